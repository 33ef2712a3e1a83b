"""Training that goes on from a checkpoint as if nothing had happened."""

from pathlib import Path

import pytest
import torch

from tensorspill import checkpoint
from tests.checkpoint import models
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.usefixtures("preloaded")

#: Sums over other numbers of ranks are added in another order.
TOLERANCE = 1e-5


def train(rank: int, root: Path, size: int) -> dict[str, list[float]]:
    """Train and save each layout; return the losses after the save."""
    found = {}
    for layout in models.layouts(size):
        model, optimizer = models.build(layout)
        models.losses(model, optimizer, range(3))
        checkpoint.save(models.state_of(model, optimizer), root / f"{layout}-{size}")
        found[layout] = models.losses(model, optimizer, range(3, 6))
    return found


def resume(rank: int, folder: Path, layout: str) -> list[float]:
    """Load into a new model and train on."""
    model, optimizer = models.build(layout)
    state = models.state_of(model, optimizer)
    models.poison(state)
    checkpoint.load(state, folder)
    models.set_state(model, optimizer, state)
    return models.losses(model, optimizer, range(3, 6))


def resume_all(rank: int, root: Path, size: int) -> dict[tuple[str, str], list[float]]:
    """Go on from every checkpoint in the same layout where there is one, else in FSDP."""
    found = {}
    for folder in sorted(root.iterdir()):
        layout = folder.name.rsplit("-", 1)[0]
        target = layout if layout in models.layouts(size) else "fsdp"
        found[folder.name, target] = resume(rank, folder, target)
    return found


@pytest.mark.thorough
def test_losses_go_on_where_they_were(tmp_path):
    sizes = (1, 2, 4)
    trained = {size: run(size, train, tmp_path, size)[0] for size in sizes}
    for size in sizes:
        for (name, target), losses in run(size, resume_all, tmp_path, size)[0].items():
            layout, saved = name.rsplit("-", 1)
            expected = trained[int(saved)][layout]
            if (layout, int(saved)) == (target, size):
                assert losses == expected, name
            else:
                assert losses == pytest.approx(expected, rel=TOLERANCE), (name, target, size)


def test_what_is_saved_in_the_background_is_the_step_it_was_called_in(tmp_path):
    def act(rank: int) -> list[list[float]]:
        model, optimizer = models.build("fsdp")
        models.losses(model, optimizer, range(3))
        saving = checkpoint.async_save(models.state_of(model, optimizer), tmp_path)
        expected = models.losses(model, optimizer, range(3, 6))
        saving.result()
        return [expected, resume(rank, tmp_path, "fsdp")]

    for expected, found in run(2, act):
        assert found == expected
    assert torch.is_grad_enabled()
