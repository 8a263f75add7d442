"""How a step is divided into messages."""

from __future__ import annotations

from ssd.ipc.messages import Emission, Load, Step
from ssd.ipc.public import TokenLogprob
from ssd.verifier.process import messages

SCORES = [TokenLogprob(5, -0.5, [])]


def test_log_probabilities_of_several_prompts_travel_apart() -> None:
    load = Load(running=3)
    plain = Emission(1, [5])
    scored = [Emission(2, [6], prompt_logprobs=SCORES), Emission(3, [7], prompt_logprobs=SCORES)]
    assert messages(Step([plain, *scored], load)) == [*(Step([one], load) for one in scored), Step([plain], load)]
    assert messages(Step(scored, load)) == [Step([one], load) for one in scored]
    assert messages(Step([plain, scored[0]], load)) == [Step([plain, scored[0]], load)]


def test_many_embeddings_travel_in_several_messages() -> None:
    load = Load(running=3)
    plain = Emission(1, [5])
    vectors = [Emission(10 + number, [], finish_reason="stop", embedding=bytes(8)) for number in range(40)]
    assert messages(Step([plain, *vectors[:16]], load)) == [Step([plain, *vectors[:16]], load)]
    parts = messages(Step([*vectors[:20], plain, *vectors[20:]], load))
    assert [len(part.emissions) for part in parts] == [16, 16, 8, 1]
    assert [each for part in parts for each in part.emissions] == [*vectors, plain]
    assert all(part.load == load for part in parts)
