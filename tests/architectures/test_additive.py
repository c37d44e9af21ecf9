"""What additive attention's preset makes of windows."""

import torch

from multilin import MultilinForCausalLM
from multilin.model import MultilinConfig


def model(n_positions: int, **options: object) -> MultilinForCausalLM:
    torch.manual_seed(0)
    config = MultilinConfig.from_architecture(
        "additive", hidden_size=8, num_layers=6, vocab_size=13, n_positions=n_positions,
        options={"num_heads": 2, **options},
    )  # fmt: skip
    return MultilinForCausalLM(config).eval().double()


def test_a_window_as_long_as_the_longest_text_is_the_whole_past() -> None:
    short, ids = model(32), torch.randint(13, (2, 32), generator=torch.Generator().manual_seed(1))
    assert [layer["window"] for layer in short.config.layers] == [4, 8, 16, None, None, None]
    assert [layer["window"] for layer in model(33).config.layers] == [4, 8, 16, 32, None, None]
    listed = [layer["window"] for layer in model(40, windows=[4, 8, 16, 32, 39, None]).config.layers]
    assert listed == [4, 8, 16, 32, 39, None]
    with torch.no_grad():
        windowed = model(40, windows=[4, 8, 16, 32, 39, None])
        windowed.load_state_dict(short.state_dict() | {
            name: tensor for name, tensor in windowed.state_dict().items() if "positions" in name
        })  # fmt: skip
        windowed.model.embedding.positions.weight[:32] = short.model.embedding.positions.weight
        torch.testing.assert_close(short(ids).logits, windowed(ids).logits)
