"""Decoding by graphs is decoding: what a graph's memory holds and gives back, without a card, and with one."""

import pytest
import torch

from multilin.errors import InputError
from multilin.inference import torch_engine
from multilin.inference.torch_engine import CALLS_BEFORE_CAPTURE, WARM_UPS, DecodingGraphs, TorchEngine
from multilin.model import TextState
from multilin.model.state import tensors_of
from tests.contract.conftest import LONGEST, MakeModel, random_ids

pytestmark = pytest.mark.slow_for_variants
ROOM = 2**30  # bytes


def replayed(task, device):
    """In place of `captured`: the task itself, after as many calls."""
    for _ in range(WARM_UPS):
        task()
    return task


def started(model, *shape: int) -> TextState:
    """The state after random tokens of as many rows."""
    state = model.new_state()
    model(random_ids(*shape), past_key_values=state, use_cache=True)
    return state


def follow(graphs: DecodingGraphs, state: TextState, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    """The logits after each token that a graph read, None where the model has to be called, as an engine then does."""
    found = []
    for ids_B1 in ids_BT.split(1, dim=1):
        logits = graphs.read(state, ids_B1)
        found.append(None if logits is None else logits.clone())
        if logits is None:
            graphs.model(ids_B1, past_key_values=state, use_cache=True)
    return found


@torch.inference_mode()
def test_sequences_that_take_turns_go_on_as_alone(make_model: MakeModel) -> None:
    model = make_model().eval()
    graphs = DecodingGraphs(model, replayed, ROOM)
    states = [started(model, rows, length) for rows, length in ((2, 9), (2, 4), (1, 1))]
    twins = [state.clone() for state in states]
    num_graphed = 0
    for turn in range(4):
        for index, state in enumerate(states):
            ids = random_ids(state.batch_size, 6 + turn, seed=10 * turn + index)
            found = follow(graphs, state, ids)
            expected = model(ids, past_key_values=twins[index], use_cache=True).logits
            for position, logits in enumerate(found):
                if logits is not None:
                    num_graphed += 1
                    torch.testing.assert_close(logits, expected[:, position].float(), rtol=1e-5, atol=1e-5)
            assert state.num_columns == twins[index].num_columns
            for (name, tensor), (_, twin) in zip(state.named_tensors(), twins[index].named_tensors(), strict=True):
                torch.testing.assert_close(tensor, twin, msg=lambda text, name=name: f"{name}: {text}")
    assert num_graphed == 90 - 2 * CALLS_BEFORE_CAPTURE


@torch.inference_mode()
def test_the_end_of_the_longest_text_is_read_by_the_model(make_model: MakeModel) -> None:
    model = make_model().eval()
    state = started(model, 1, LONGEST - 14)
    found = follow(DecodingGraphs(model, replayed, ROOM), state, random_ids(1, 14))
    last = [model.config.n_positions is None] * (WARM_UPS - 1)
    graphed = 14 - CALLS_BEFORE_CAPTURE - len(last)
    assert [logits is not None for logits in found] == [False] * CALLS_BEFORE_CAPTURE + [True] * graphed + last
    assert state.num_columns == LONGEST


@torch.inference_mode()
def test_the_tokens_of_a_row_count_and_not_the_columns_of_its_state(make_model: MakeModel) -> None:
    model = make_model().eval()
    engine, graphs = TorchEngine(model), DecodingGraphs(model, replayed, ROOM)
    state = started(model, 1, LONGEST - 12)
    restored = engine.restore(engine.save(state))
    follow(graphs, restored, random_ids(1, 12))
    assert restored.num_tokens.tolist() == [LONGEST]
    early, late = started(model, 1, 3), started(model, 1, LONGEST - 1)
    early.join(late)
    early.leave(1)
    assert follow(graphs, early, random_ids(1, 4))[-1] is not None


@torch.inference_mode()
def test_states_that_do_not_fit_are_refused_or_left_to_the_model(make_model: MakeModel) -> None:
    model = make_model().eval()
    graphs, state = DecodingGraphs(model, replayed, ROOM), started(model, 1, 3)
    with pytest.raises(InputError, match="a state of 1 rows given for 2 rows"):
        graphs.read(state, random_ids(2, 1))
    state.activate_past_recording()
    assert not any(logits is not None for logits in follow(graphs, state, random_ids(1, 12)))


@pytest.mark.filterwarnings("ignore:no memory for a CUDA graph of 2 rows")
@torch.inference_mode()
def test_without_memory_the_graphs_that_there_are_stay(make_model: MakeModel) -> None:
    model, ids = make_model().eval(), random_ids(1, CALLS_BEFORE_CAPTURE + 1)

    def capture(task, device):
        if len(graphs._graphs) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replayed(task, device)

    graphs, alone = DecodingGraphs(model, capture, ROOM), started(model, 1, 3)
    assert follow(graphs, alone, ids)[-1] is not None
    assert follow(graphs, started(model, 2, 3), random_ids(2, 12))[-1] is None
    assert graphs.read(alone, ids[:, :1]) is not None


@torch.inference_mode()
def test_the_graph_that_was_not_used_for_longest_goes(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "MOST_GRAPHS", 2)
    model = make_model().eval()
    graphs = DecodingGraphs(model, replayed, ROOM)
    for rows in (1, 2, 1, 3):
        follow(graphs, started(model, rows, 3), random_ids(rows, CALLS_BEFORE_CAPTURE + 1))
    assert sorted(graphs._graphs) == [1, 3]


@torch.inference_mode()
def test_the_states_of_all_graphs_have_a_limit(make_model: MakeModel) -> None:
    model = make_model().eval()
    alone, pair = started(model, 1, 9), started(model, 2, 9)
    ids = {state.batch_size: random_ids(state.batch_size, CALLS_BEFORE_CAPTURE + 1) for state in (alone, pair)}
    follow(graphs := DecodingGraphs(model, replayed, ROOM), pair, ids[2])
    room = sum(tensor.nbytes for part in graphs._graphs[2].state.parts for tensor in tensors_of(part))
    small = DecodingGraphs(model, replayed, room)
    assert follow(small, alone, ids[1])[-1] is not None
    assert follow(small, pair, ids[2])[-1] is not None
    assert list(small._graphs) == [2]  # that of one row had to go
    assert follow(DecodingGraphs(model, replayed, room - 1), pair, ids[2])[-1] is None


@pytest.mark.filterwarnings("ignore:no CUDA graph")
@torch.inference_mode()
def test_a_model_that_gives_no_graph_is_called_instead(make_model: MakeModel) -> None:
    model, tried = make_model().eval(), []

    def refuse(task, device):
        tried.append(task)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs, state = DecodingGraphs(model, refuse, ROOM), started(model, 1, 3)
    twin, ids = state.clone(), random_ids(1, 2 * CALLS_BEFORE_CAPTURE)
    assert not any(logits is not None for logits in follow(graphs, state, ids))
    assert len(tried) == 1
    model(ids, past_key_values=twin, use_cache=True)
    for (_, tensor), (_, expected) in zip(state.named_tensors(), twin.named_tensors(), strict=True):
        torch.testing.assert_close(tensor, expected)


@pytest.mark.gpu
def test_an_engine_on_a_card_decodes_by_graphs(make_model: MakeModel) -> None:
    exact, engine = TorchEngine(make_model()), TorchEngine(make_model(torch.float32).cuda())
    for turn, rows in enumerate((2, 1, 2)):
        state, twin, ids = engine.new_state(rows), exact.new_state(rows), random_ids(rows, 40, seed=turn)
        for start, end in [(0, 5), *((position, position + 1) for position in range(5, 40))]:
            piece = ids[:, start:end].tolist()
            found, expected = engine.read(state, piece), exact.read(twin, piece)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    assert engine.graphs is not None
    assert sorted(engine.graphs._graphs) == [1, 2]
