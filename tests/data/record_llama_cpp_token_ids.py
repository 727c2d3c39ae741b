"""Records what llama.cpp makes of hard texts, as a second opinion for tests/test_tokenizer.py.

    pip install llama-cpp-python==0.3.36
    python tests/data/record_llama_cpp_token_ids.py smollm2-135m=PATH qwen2.5-coder-0.5b=PATH

Writes llama_cpp_token_ids.json next to itself. llama.cpp does not normalise, while the Qwen tokenizer brings text into
NFC first: texts that are not in NFC are recorded for SmolLM2 only.
"""

import json
import sys
import unicodedata
from pathlib import Path

import llama_cpp

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    "Hello, world!",
    " leading",
    "trailing ",
    "   both sides   ",
    "  5",
    "0 7 42 1234567890 3.14159 1,000,000",
    "٣٤ ½ ² Ⅷ 万",
    "don't I'LL we'Ve 'S 'tis ''s",
    "x'String y'THE z'LLelect it'sabc",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u00fcber",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",
    "\u0301 a lone accent",
    "\r\n",
    "one\r\ntwo\rthree\nfour\n\n\nfive",
    "\ttab\t\ttabs \t mixed\n\t\tindent",
    "def f(x):\n    if x:\n        return [1, 2]\n\n\n    # end   \n",
    "a  b   c    d     e",
    "line end   \n   line start",
    "\u00a0no-break\u00a0space\u2003em\u3000wide",
    "😀",
    "👨\u200d👩\u200d👧\u200d👦 family, 🏳\ufe0f\u200d🌈 flag, 👍🏽 thumb, 🇨🇭",
    "你好，世界！これはテストです。한국어 텍스트",
    "Привет мир, γειά σου, שלום, مرحبا, नमस्ते, สวัสดี",
    "<|im_end|>",
    "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<|endoftext|><|endoftext|> c",
    " <|im_end|> ",
    "<|im_end|",
    "<|im_end |> <im_end> |im_end|>",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<repo_name>x<file_sep>y",
    "[PAD151665] [PAD]",
    "x\u0000y",
    "\ufeffbom \ufffd replacement",
    "!!!???...---===*** :-) <>&\"'`~",
    "supercalifragilisticexpialidocious ANTIDISESTABLISHMENTARIANISM",
    "http://example.org/a?b=c&d=%20#frag",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠮷",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 70 + "x",
    "\n" * 30,
]


def main(arguments: list[str]) -> None:
    recorded = {}
    for argument in arguments:
        name, _, path = argument.partition("=")
        model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        texts = [t for t in TEXTS if not name.startswith("qwen") or unicodedata.is_normalized("NFC", t)]
        recorded[name] = [
            {"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=True)} for text in texts
        ]
    header = f'{{\n"llama_cpp_python": {json.dumps(llama_cpp.__version__)},\n"models": {{\n'
    models = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, cases)) + "\n]" for name, cases in recorded.items()
    )
    Path(__file__).with_name("llama_cpp_token_ids.json").write_text(header + models + "\n}\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
