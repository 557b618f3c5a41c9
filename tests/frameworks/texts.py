"""What errors of programs look like in their output, and how they are shown on a page."""

import re

EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*\.)?\w*(?:Error|Exception|Timeout): .*)$")
PORT = re.compile(r"(127\.0\.0\.1\]?(?::|, ))\d+")


def shown(text: str) -> str:
    """Without what only says where torch was built and which port it was this time."""
    return PORT.sub(r"\1PORT", text.replace("/__w/pytorch/pytorch/third_party/", ""))
