"""What crosses the link, for the tests of all messages in tests/ipc/test_messages.py."""

from __future__ import annotations

from ssd.config.params import Speculation
from ssd.ipc import messages as m
from ssd.ipc.public import Direction, Message
from ssd.plugins.remote import link as n

SPECULATION = Speculation(num_speculative_tokens=2, fan_out=(3, 2, 4), backup="none")


def directions(to_draft: list[Message]) -> list[tuple[list[Message], Direction]]:
    """Messages and their direction; of what a draft beside the target is told, most crosses the link too."""
    return [
        (
            [
                n.Offer("draft", "fingerprint", 49152),
                n.Joined(),
                n.Published(
                    [n.Entry(1, 3, 20, 2, 9, 1, 3, [4, 5])], 1, 2, 10**7, 12, 2**60, 10**6, [n.Trunk(1, 3, 20, [9, 8])]
                ),
            ],
            n.DRAFT_TO_RECEIVER,
        ),
        (
            [
                n.Terms("target", 49152, 8, 2048, SPECULATION),
                n.TargetVocabulary({"a": 0, "b": 1}),
                n.NotAccepted("another draft is connected", again=True),
                n.Beat(2**60),
                *[message for message in to_draft if not isinstance(message, m.Ready | m.Leave)],
            ],
            n.RECEIVER_TO_DRAFT,
        ),
    ]
