"""TensorBoard: the scalars of a run reach any writer that has add_scalar."""

from pathlib import Path

import pytest
import torch

import rumor
from tests.cluster import Cluster

TAGS = {"rumor/loss", "rumor/consensus_distance", "rumor/H", "rumor/bytes_sent", "rumor/seconds_waiting"}


class Fake:
    """A writer that is not TensorBoard's."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.setdefault(tag, []).append((step, value))


def run(rank: int, folder: Path) -> tuple[dict[str, list[tuple[int, float]]], list[dict[str, float]]]:
    """Logs three steps to a fake and to TensorBoard's own; returns what the fake got, and what the averager knew."""
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(rank)
    model, fake = torch.nn.Linear(3, 1), Fake()
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(4), H=2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    known = []
    with SummaryWriter(str(folder / str(rank))) as writer:
        for step in range(3):
            loss = model(torch.randn(5, 3)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            averager.step(loss)
            averager.consensus_distance()
            for each in (fake, writer):
                averager.metrics.log_to(each, step, loss=loss)
            known.append({"loss": loss.item(), **averager.metrics.scalars()})
    return fake.written, known


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's protobuf
def test_scalars_reach_tensorboard_and_any_writer(four: Cluster, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank, (written, known) in enumerate(four.run(run, tmp_path)):
        assert set(written) == TAGS
        events = EventAccumulator(str(tmp_path / str(rank)))
        events.Reload()
        assert set(events.Tags()["scalars"]) == TAGS
        for tag in TAGS:
            name = tag.removeprefix("rumor/")
            assert written[tag] == [(step, row[name]) for step, row in enumerate(known)]
            read = [(event.step, event.value) for event in events.Scalars(tag)]
            assert read == [(step, pytest.approx(value)) for step, value in written[tag]]
        assert known[1]["consensus_distance"] < 1e-9 < known[0]["consensus_distance"], "step 2 is a global average"


def test_what_is_not_known_is_left_out() -> None:
    fake = Fake()
    rumor.Metrics(bytes_sent=7).log_to(fake, 5)
    assert fake.written == {"rumor/bytes_sent": [(5, 7.0)], "rumor/seconds_waiting": [(5, 0.0)]}
