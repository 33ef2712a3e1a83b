"""A model of Hugging Face's: built on the drive and trained there to the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorspill.optimizer import SpilledOptimizer, clip_grad_norm_
from tensorspill.training import init, load_safetensors, offloaded
from tests.residency.test_residency import one_thread
from tests.training.trainer import check_equal

__all__ = ["one_thread"]

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "huggingface_offload.py"


def configuration(tied):
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )


def make(tied):
    torch.manual_seed(2)
    return transformers.AutoModelForCausalLM.from_config(configuration(tied))


def train(model, optimizer, clip):
    losses = []
    for seed in range(3):
        text = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=text, labels=text).loss
        torch.autograd.backward(loss)
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gradients", ["memory", "spilled"])
def test_training_gives_the_same_bits(tmp_path, tied, gradients):
    reference = make(tied)
    with init(tmp_path, 150_000, gradients=gradients, min_bytes=1024):
        model = make(tied)
    expected = train(
        reference, torch.optim.AdamW(reference.parameters()), torch.nn.utils.clip_grad_norm_
    )
    with (
        offloaded(model) as handle,
        SpilledOptimizer(
            torch.optim.AdamW, model.parameters(), folder=tmp_path, budget="1MiB", min_bytes=1024
        ) as optimizer,
    ):
        assert train(model, optimizer, clip_grad_norm_) == expected
        assert handle.statistics().peak_bytes <= 150_000
        assert not handle.residency._kept
        handle.close(restore=True)
    check_equal(model, reference)


def test_a_checkpoint_of_its_own_is_loaded(tmp_path):
    reference = make(True)
    reference.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    with init(tmp_path, 150_000, min_bytes=1024, values=False):
        model = transformers.AutoModelForCausalLM.from_config(configuration(True))
    load_safetensors(model, tmp_path / "saved")
    text = torch.arange(16)[None]
    assert torch.equal(model(input_ids=text).logits, reference(input_ids=text).logits)
    offloaded(model).close(restore=True)
    check_equal(model, reference)


@pytest.mark.thorough
def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--folder", tmp_path, "--steps", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "on the drive" in done.stdout
    assert not list(tmp_path.iterdir())
