"""No fault between target and draft costs more than speed: no token, no page, no cell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ssd.config.params import Speculation
from ssd.ipc.messages import Admit, Launch, Launched, Outcomes, Rejoin, Release, Verified
from ssd.ipc.public import Message
from tests.draft.audit import GREEDY, PROMPTS, SAMPLED, Auditor, World, plainly
from tests.draft.pair import Draft, Pair, ScriptedTarget, config, params

Post = Callable[[Message], bool]


def lossy(deliver: Post, choice: random.Random) -> Post:
    """One message in four is lost without notice."""
    return lambda message: choice.random() < 0.25 or deliver(message)


def doubling(deliver: Post, choice: random.Random) -> Post:
    """Every other message arrives twice."""
    return lambda message: deliver(message) and (choice.random() < 0.5 or deliver(message))


def disordered(deliver: Post, choice: random.Random) -> Post:
    """One message in three is overtaken by the next."""
    late: list[Message] = []

    def post(message: Message) -> bool:
        if choice.random() < 0.33:
            late.append(message)
            return True
        deliver(message)
        while late:
            deliver(late.pop())
        return True

    return post


def meddling(deliver: Post, choice: random.Random) -> Post:
    """Messages that nobody sent come in between: of unknown sequences, and of rounds that never were."""

    def post(message: Message) -> bool:
        request = choice.randint(0, 9)
        in_flight = choice.choice((None, *range(7)))
        deliver(Outcomes([Verified(request, choice.randint(0, 5), choice.randint(0, 6), 1, in_flight)]))
        others = [choice.randint(0, 130) for _ in range(choice.choice((0, 0, 3)))]
        deliver(Launched([Launch(request, choice.randint(0, 5), choice.randint(0, 6), others)]))
        deliver(Release([choice.randint(4, 9)]))
        return deliver(message)

    return post


@pytest.mark.parametrize("fault", [lossy, doubling, disordered, meddling])
@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_messages_that_go_astray_cost_no_token_and_no_page(
    world: World, fault: Callable[[Post, random.Random], Post], backup: str, temperature: float
) -> None:
    settings = config(Speculation("ssd", 4, (3,), "none" if backup == "none" else "jit"))
    draft = Draft(settings, world.draft)
    pair = Pair(settings, world.target, draft)
    pair.post = fault(pair.deliver, random.Random(1))
    texts = pair.run(PROMPTS, params(4, 24, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 24).ids
    draft.hear(Release(list(range(10))))
    draft.assert_empty()


def test_the_same_sequence_admitted_again_begins_afresh(world: World) -> None:
    speculation = Speculation("ssd", 4, (3,), "jit")
    draft = Draft(config(speculation), world.draft)
    Auditor(world, draft)
    first = ScriptedTarget(draft, 0, PROMPTS[2], GREEDY, speculation)
    first.outcome(0, list(draft.engine.trees[0].chains)[1].tokens[0], 4)
    again = ScriptedTarget(draft, 0, [*first.tokens, 8], SAMPLED, speculation, round_number=7)
    assert again.outcome(0, list(draft.engine.trees[0].chains)[1].tokens[0], 4)
    assert draft.board.rejected == 0
    again.release()
    draft.assert_empty()


# -- the draft goes and comes -----------------------------------------------------------------------------------------


def events(pair: Pair, every: int, then: Callable[[], None]) -> Iterator[None]:
    while True:
        for _ in range(every):
            yield
        then()


@pytest.mark.parametrize(("every", "temperature"), [(2, 0.8), (3, 0.0), (7, 0.8)])
def test_a_draft_that_starts_over_is_told_everything_and_is_of_use_again(
    world: World, every: int, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A new draft of a new epoch comes in the middle of the texts, again and again; the old entries count for
    nothing."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    draft = Draft(settings, world.draft)
    Auditor(world, draft)
    pair = Pair(settings, world.target, draft)

    def restart() -> None:
        draft.restart()
        pair.proposer.session.join(draft.epoch)

    script = events(pair, every, restart)
    pair.between_steps = lambda: next(script)
    texts = pair.run(PROMPTS, params(4, 40, temperature))
    assert draft.epoch > 2
    assert texts.ids == plainly(world, PROMPTS, temperature, 40).ids
    assert sum(m.accepted_tokens for m in texts.metrics) > 0
    draft.assert_empty()
    lost = [record for record in caplog.records if record.name == "ssd.draft"]
    assert not lost, "no sequence lost its draft for good"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_is_away_for_a_while(world: World, temperature: float) -> None:
    """No message arrives and the board stays as it was. Then a new draft says hello, and is told of the requests one by
    one: it must compute each text, and a round must not wait for all of them."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    draft = Draft(settings, world.draft)
    pair = Pair(settings, world.target, draft)
    steps, followed = iter(range(1000)), list[int]()

    def away() -> None:
        step = next(steps)
        if step == 3:
            pair.post = lambda message: False
        elif step == 9:
            pair.post = pair.deliver
            draft.restart()
            pair.proposer.session.join(draft.epoch)
        elif step > 9:
            followed.append(len(draft.engine.trees))

    pair.between_steps = away
    texts = pair.run(PROMPTS, params(4, 24, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 24).ids
    assert followed[: len(PROMPTS)] == [1, 2, 3, 4]
    draft.assert_empty()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_message_that_could_not_be_sent_the_draft_rejoins(world: World, temperature: float) -> None:
    """The target knows that a message was lost: it asks the draft to say hello again, and tells it everything."""
    settings = config(Speculation("ssd", 4, (3,), "none"))
    draft = Draft(settings, world.draft)
    Auditor(world, draft)
    pair = Pair(settings, world.target, draft)
    sent: list[Message] = []

    def post(message: Message) -> bool:
        sent.append(message)
        return len(sent) not in (6, 7, 20) and pair.deliver(message)

    pair.post = post
    texts = pair.run(PROMPTS, params(4, 24, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 24).ids
    kinds = [type(message) for message in sent]
    assert kinds.count(Rejoin) == 3  # the second was lost as well
    assert kinds[kinds.index(Rejoin) + 2] is Admit
    assert draft.epoch == 3
    draft.assert_empty()
