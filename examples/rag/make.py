"""Write notes of patients of three practices, with names, addresses and telephone numbers.

    python make.py -o notes.jsonl [--notes 240] [--seed 0]

Nobody in them is real. `identity` is the practice that may read a note.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from faker import Faker

PRACTICES = ("north", "south", "west")
WHY = (
    "a sore knee after a fall on the stairs",
    "headaches in the morning and poor sleep",
    "advice before a trip to the tropics",
    "a rash on both arms since last week",
    "a cough that does not get better",
    "a blood pressure that is too high at home",
    "pain in the lower back after moving house",
    "tiredness and a loss of weight",
)
DONE = (
    "Gave ibuprofen and asked for rest",
    "Took blood for a full count",
    "Advised less coffee and a diary",
    "Wrote a letter to the hospital",
    "Ordered an X-ray of the chest",
    "Changed the dose of the tablets",
)


def make_note(faker: Faker, draw: random.Random) -> tuple[str, dict[str, list[str]]]:
    """Return a note of some 60 words, and the personal data in it by kind."""
    name = faker.name()
    mail = f"{name.split()[0].lower()}.{draw.randrange(10_000)}@example.org"
    street = faker.street_address()
    text = (
        f"{name}, {draw.randrange(18, 90)}, a {faker.job().lower()}, came with "
        f"{draw.choice(WHY)}; {faker.sentence(10).lower()} {draw.choice(DONE)}. "
        f"Lives at {street} with {draw.choice(['a partner', 'a son', 'two cats', 'nobody'])}, "
        f"reads mail at {mail}. {faker.sentence(14)} To come again on {faker.date()}."
    )
    return text, {"name": [name], "address": [street], "email": [mail]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", dest="out", type=Path, required=True)
    parser.add_argument("--notes", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faker = Faker()
    faker.seed_instance(arguments.seed)
    draw = random.Random(arguments.seed)
    with arguments.out.open("w") as file:
        for number in range(arguments.notes):
            text, personal_data = make_note(faker, draw)
            practice = PRACTICES[number % len(PRACTICES)]
            row = {"id": f"n{number}", "text": text, "identity": practice, "pii": personal_data}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
