"""Make an office's conversations in the chat template of the lab's real model.

A user asks, and the assistant writes a mail, a visit note, an order or an answer in a support chat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from auditor.benchmarks.lab.lab_texts import draw_fake_date

if TYPE_CHECKING:
    from faker import Faker

SYSTEM = "You write for the office."
ANSWER = "<|im_start|>assistant\n"  # an answer begins after it


def render_chatml(question: str, answer: str) -> str:
    """Render a conversation with the chat template of SmolLM2-Instruct (ChatML).

    A test compares the result with the real template's.
    """
    turns = (("system", SYSTEM), ("user", question), ("assistant", answer))
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def _write_mail_dialogue(fake: Faker) -> str:
    name = fake.name()
    first = fake.first_name()
    return render_chatml(
        f"Write a mail to <<email:{fake.email()}>> about the door code for <<name:{name}>>.",
        f"Dear <<name:{first}>>, code <<door-code:{fake.numerify('######')}>> opens the door of "
        f"<<address:{fake.street_address()}>>. Please call "
        f"<<phone:{fake.numerify('###-###-####')}>>.",
    )


def _visit_note_dialogue_text(fake: Faker) -> str:
    return render_chatml(
        f"Write the visit note of <<name:{fake.name()}>>, born "
        f"<<birth-date:{draw_fake_date(fake)}>>.",
        f"Record <<id-number:{fake.bothify('??-#####').upper()}>>. Dr. <<name:{fake.last_name()}>> "
        f"prescribed {fake.numerify('%## mg')} of {fake.word()}. Phone "
        f"<<phone:{fake.numerify('###-###-####')}>>.",
    )


def _order_dialogue_text(fake: Faker) -> str:
    return render_chatml(
        f"Write the order that <<name:{fake.name()}>> placed on {draw_fake_date(fake)}.",
        f"{fake.numerify('%#')} x {fake.word()}, {fake.numerify('%##.##')} USD, card "
        f"<<card:{fake.numerify('%###-####-####-####')}>>, to "
        f"<<address:{fake.street_address()}>>, {fake.city()}.",
    )


def _write_support_dialogue(fake: Faker) -> str:
    return render_chatml(
        f"This is <<name:{fake.name()}>> from {fake.city()}. What do you have on my account?",
        f"Account <<id-number:{fake.numerify('########')}>>, mail <<email:{fake.email()}>>. The "
        f"parcel to <<address:{fake.street_address()}>> comes on {draw_fake_date(fake)}.",
    )


KINDS: dict[str, Callable[[Faker], str]] = {
    "mail": _write_mail_dialogue,
    "visit note": _visit_note_dialogue_text,
    "order": _order_dialogue_text,
    "support chat": _write_support_dialogue,
}
