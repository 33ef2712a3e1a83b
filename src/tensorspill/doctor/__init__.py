"""The doctor: what this machine can do, layer by layer, with evidence and remedies.

`examination.examine` returns a frozen `row.Diagnosis`. It never raises and never hangs: what might
wait for ever (CUDA, cuFile, a file system whose server has gone) is looked at in child processes
that have a time limit, and each layer is looked at by itself.

=================  =========================================================
`row`              what is found: rows, verdicts, the diagnosis
`examination`      looks at all layers, here or in a tree of ``sys`` and ``proc``
`children`         runs child processes that may hang or crash
`path_child`       what is tried in a folder
`cuda_child`       what is asked of the CUDA driver
`gds_child`        what GPUDirect Storage does between the folder and a GPU
`gpus`, `direct`,  the layers: driver and GPUs; cuFile and what it needs; IOMMU and
`bus`, `storage`,  ACS; files and drives; limits of the operating system
`limits`
`verdicts`         whether each backend would work
=================  =========================================================
"""
