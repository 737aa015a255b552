"""Bytes on the tape are those of a hand count: what is saved, what a gradient takes, what is made again."""

import pytest

from probes.fit.tape import Storage, Tape, Tensor

K = 1024  # numbers; sizes are multiples of the allocator's 512 bytes, so nothing is rounded


def kept(tape: Tape) -> int:
    return tape.ledger.alive["activations"]


def test_a_storage_is_rounded_as_torch_does_and_freed_with_its_last_reference() -> None:
    tape = Tape(training=True)
    first = Storage(tape.ledger, 1)
    second = first
    assert tape.ledger.sum == 512
    del first
    assert tape.ledger.sum == 512
    del second
    assert (tape.ledger.sum, tape.ledger.highest) == (0, 512)


@pytest.mark.parametrize(("trained", "saved"), [(True, 4 * K), (False, 0)])
def test_a_linear_layer_saves_its_input_only_for_its_weights_gradient(trained: bool, saved: int) -> None:
    tape = Tape(training=True)
    weight = tape.weight(K * K, 4, trained=trained)
    x = tape.fresh(K, 4)
    y = tape.linear(x, weight, None, outputs=K, rows=1)
    del x
    assert kept(tape) == saved + y.n_bytes


def test_a_step_back_leaves_the_gradients_and_nothing_else() -> None:
    tape = Tape(training=True)
    weight = tape.weight(K * K, 4, trained=True)
    y = tape.linear(tape.fresh(K, 4), weight, None, outputs=K, rows=1)
    tape.backward(y)
    del y
    assert tape.ledger.alive["gradients"] == 4 * K * K
    assert kept(tape) == 0


def test_autocast_keeps_one_cast_of_each_trained_weight_until_its_end() -> None:
    tape = Tape(training=True, half=2)
    weight = tape.weight(K * K, 4, trained=True)
    for _ in range(2):
        tape.linear(tape.fresh(K, 2), weight, None, outputs=K, rows=1)
    assert kept(tape) == 2 * K * K
    tape.forget_casts()
    assert kept(tape) == 0


def layers(tape: Tape, count: int, *, checkpointed: bool) -> Tensor:
    weights = [tape.weight(K * K, 4, trained=True) for _ in range(count)]
    x = tape.op(64 * K, 4, (weights[0],))

    def layer(weight: Tensor, given: Tensor) -> Tensor:
        for _ in range(4):
            given = tape.linear(given, weight, None, outputs=K, rows=64)
        return given

    for weight in weights:

        def run(given: Tensor, weight: Tensor = weight) -> Tensor:
            return layer(weight, given)

        x = tape.checkpoint(run, x) if checkpointed else run(x)
    return x


def test_checkpointing_keeps_each_layers_input_and_makes_the_rest_again() -> None:
    one = 64 * K * 4  # bytes of an activation
    plain, again = Tape(training=True), Tape(training=True)
    last = layers(plain, 8, checkpointed=False)
    assert kept(plain) == 8 * 4 * one + one
    lean = layers(again, 8, checkpointed=True)
    assert kept(again) == 8 * one + one
    plain.backward(last)
    again.backward(lean)
    assert again.ledger.alive["gradients"] == plain.ledger.alive["gradients"] == 8 * 4 * K * K
    saved = plain.ledger.at_highest["activations"] - again.ledger.at_highest["activations"]
    assert saved > 15 * one
    del last, lean
    assert kept(again) == kept(plain) == 0


def test_without_training_nothing_is_kept() -> None:
    tape = Tape(training=False)
    y = layers(tape, 3, checkpointed=True)
    assert kept(tape) == y.n_bytes
