"""Loads a tokenizer.json in a process of its own, since the file may be from a stranger.

A damaged file can make the `tokenizers` library panic, or ask for so much memory that the process
is aborted. This file is run as a script, with the JSON on stdin: it imports nothing of jaxpar, and
therefore starts fast. It prints the reason why the tokenizer cannot be used, or nothing.
"""

import resource
import sys

#: Limits of the process. A vocabulary of a million tokens takes less than 1 GB and 5 s.
MAX_MEMORY, MAX_SECONDS = 2 << 30, 20

#: A text with characters, spaces and scripts that a vocabulary may lack.
TEXT = "a The quick brown fox, 123!\n\té 日本 👩\u200d🔬 \u0000"


def probe(text: str) -> str:
    """Load a tokenizer.json, encode TEXT, and decode it. Returns the error, or "".

    Args:     text: content of the file.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for special in (True, False):
            ids = tokenizer.encode(TEXT, add_special_tokens=special).ids
            tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException as error:  # a panic is no Exception
        return " ".join(str(error).split()) or type(error).__name__
    return ""


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(probe(sys.stdin.buffer.read().decode("utf-8")))
