"""The alphabet in which byte-level BPE vocabularies spell bytes: one printable character for each of the 256."""

from __future__ import annotations


def _byte_to_char() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_TO_CHAR = _byte_to_char()
"""GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the rest counts up from U+0100."""

CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
