"""A Hugging Face causal LM, trained with parameters, gradients and optimizer states on the drive.

    python examples/huggingface_offload.py --folder /mnt/nvme
    python examples/huggingface_offload.py --folder /mnt/nvme --weights path/to/a/checkpoint

The model is built from a configuration, straight into the spill file; with ``--weights``, a folder
of safetensors files is loaded into it block by block. It learns bytes of this repository's text.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import tensorspill
from tensorspill import timeline
from tensorspill.optimizer import SpilledOptimizer, clip_grad_norm_
from tensorspill.training import init, load_safetensors, offloaded

CONTEXT, BATCH = 128, 4


def configuration(weights: str | None) -> LlamaConfig:
    """Return the configuration of a checkpoint, or of a small Llama for bytes."""
    if weights is not None:
        return AutoConfig.from_pretrained(weights)
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )


def batches(steps: int) -> list[torch.Tensor]:
    """Return pieces of the library's own source, as bytes."""
    root = Path(tensorspill.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - CONTEXT, (steps, BATCH, 1), generator=generator)
    return list(data[starts + torch.arange(CONTEXT)])


def main() -> None:
    """Train a few steps, and say what was moved."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", help="on a fast drive (default: a temporary folder)")
    parser.add_argument("--weights", help="a folder with a configuration and safetensors files")
    parser.add_argument("--resident", default="8MiB", help="memory for parameters and gradients")
    parser.add_argument("--states", default="16MiB", help="memory for optimizer states")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        train(options, folder)


def train(options: argparse.Namespace, folder: str) -> None:
    """Build, load, and train."""
    torch.manual_seed(0)
    config = configuration(options.weights)
    with init(folder, options.resident, gradients="spilled", values=options.weights is None):
        model = AutoModelForCausalLM.from_config(config)
    if options.weights is not None:
        load_safetensors(model, options.weights)
    with (
        offloaded(model) as handle,
        SpilledOptimizer(
            torch.optim.AdamW, model.parameters(), folder=folder, budget=options.states, lr=3e-4
        ) as optimizer,
        timeline.recording() as recorded,
    ):
        for text in batches(options.steps):
            with recorded.step():
                loss = model(input_ids=text, labels=text).loss
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            print(f"loss {loss.item():.4f}  {timeline.line(recorded.steps[-1])}")
        done = handle.statistics()
        print(
            f"{done.spilled_bytes / 1e6:.0f} MB of parameters on the drive, "
            f"at most {done.peak_bytes / 1e6:.0f} MB of them in memory"
        )


if __name__ == "__main__":
    main()
