"""The picture of a report in README is of today."""

from __future__ import annotations

from PIL import Image

from tests.docs import picture


def test_the_picture_is_of_todays_first_screen() -> None:
    """After a change of the first screen: python -m tests.docs.picture RUN, of README's run."""
    with Image.open(picture.PICTURE) as drawn:
        assert drawn.info[picture.STAMP] == picture.compute_first_screen_digest()
