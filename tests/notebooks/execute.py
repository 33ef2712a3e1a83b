"""Executes a notebook with other parameters, in a process of its own.

``python execute.py NOTEBOOK PARAMETERS OUTPUT``, where the parameters are JSON. They are set in a
cell behind the one that is tagged ``parameters``.
"""

import json
import sys

import nbformat
from nbclient import NotebookClient


def main() -> None:
    source, parameters, output = sys.argv[1:]
    notebook = nbformat.read(source, as_version=4)
    place = next(
        number
        for number, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", ())
    )
    lines = [f"{name} = {value!r}" for name, value in json.loads(parameters).items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    try:
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    finally:
        nbformat.write(notebook, output)


if __name__ == "__main__":
    main()
