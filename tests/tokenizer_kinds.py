"""Small tokenizers of every kind that the exported page takes, and text and tokens that tell them apart."""

import functools
import itertools
import json
import random
import unicodedata
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from multilin.data.added_text import plain_tokenizer
from multilin.data.tokenizers import train_tokenizer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINED_ON = (
    "It's a text, they'LL say; größer than 漢字 and 仮名! 😀😀 👩‍👩‍👧 costs 1234,50 €. \r\n\r\n  the end\tof the text"
    " ÉCOLE été हिन्दी العربية ＡＢ　ǅ \u0085 \ufeff ½ ① a\u0301 <|im_start|> <unk> </s> <tool> ▁ "
) * 3
# Characters that libraries treat in different ways: whitespace, joiners, marks, titlecase, special foldings, new ones.
ODD = [
    *"\x1c\x1d\x1e\x1f\x85\u180e\u200b\ufeff\xa0\u3000\u2028\u2029\u200d\u0345\u0301\u0323\u0334\x00\x7f\ufffd\uffff",
    *"ʕǅſKİΣςß½①٣𝟘₂ffi▁Ġ😀€",
    *("\r\n", "\n\n", "  ", " \u0301", "'S", "'ſ", "'LL", "👩‍👩‍👧", "🇩🇪", " constructor", "e\u0301"),
    *("<|im_start|>", "</s>", "<tool>", "<tool_call>", " <tool>", "<unk>", "<0xE2>"),
    *("\u1acf", "\u088f", "\U0001e6c0", "\U000323b0", "\U00011de0", "\U0010ffff", "\U000105d2\u0307"),
    *("\U00011935\U00011930", "\u0915\u093c", "\ud55c", "\u1112\u1161\u11ab", "\u0344", "\u2126", "\u0958"),
]  # fmt: skip


def added(*names: str, **options: bool) -> list[AddedToken]:
    return [AddedToken(name, **({"special": False, "normalized": False} | options)) for name in names]


def byte_level(pattern: str | None = None, *before: pre_tokenizers.PreTokenizer, **model: bool) -> Tokenizer:
    """BPE over bytes, of words that a pattern finds; GPT-2's if there is none."""
    tokenizer = Tokenizer(models.BPE(**model))
    first = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, *first, last])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator([TRAINED_ON], trainer)
    tokenizer.add_special_tokens(added("<|im_start|>", "</s>", special=True))


def pieces(kind: str, *, falls_back: bool = True, **parts: object) -> Tokenizer:
    """A vocabulary of SentencePiece's kind, with bytes for the characters that it lacks."""
    letters = "".join(sorted(set(TRAINED_ON)))[::2]  # half of them are spelled in bytes, or unknown
    text = TRAINED_ON.translate({ord(c): None for c in set(TRAINED_ON) - set(letters) - set(" aehst▁")})
    is_bpe = kind == "bpe"
    trained = Tokenizer(models.BPE(unk_token="<unk>") if is_bpe else models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {"vocab_size": 150, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**options) if is_bpe else trainers.UnigramTrainer(**options, unk_token="<unk>")
    trained.train_from_iterator([text], trainer)
    content = json.loads(trained.to_str())
    names, model = [f"<0x{byte:02X}>" for byte in range(256)], content["model"]
    if is_bpe:
        model["vocab"] |= {name: len(model["vocab"]) + number for number, name in enumerate(names)}
        model["fuse_unk"] = True
    else:
        model["vocab"] += [[name, -20.0] for name in names]
    model["byte_fallback"] = falls_back
    tokenizer = Tokenizer.from_str(json.dumps(content))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(chain)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(added("<tool>"))
    return tokenizer


def words() -> Tokenizer:
    """As tasks have them."""
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate([".", "a", "b", "the"])}, unk_token=".")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def normalized(tokenizer: Tokenizer, normalizer: normalizers.Normalizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def split(pattern: str | Regex, behavior: str, *, invert: bool = False) -> Tokenizer:
    return pieces("bpe", pre_tokenizer=pre_tokenizers.Split(pattern, behavior, invert=invert))


def trained(kind: str) -> Tokenizer:
    return train_tokenizer([TRAINED_ON], kind, {"byte": None, "bpe": 330, "unigram": 270}[kind]).backend_tokenizer


Metaspace, Replace, Sequence = pre_tokenizers.Metaspace, normalizers.Replace, normalizers.Sequence
LLAMA2 = Sequence([normalizers.Prepend("▁"), Replace(" ", "▁")])
KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{kind: functools.partial(trained, kind) for kind in ("byte", "bpe", "unigram")},
    "Llama 3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "GPT-4o": lambda: byte_level(GPT4O),
    "Qwen": lambda: normalized(byte_level(LLAMA3), normalizers.NFC(), *added("<tool>", "<tool_call>")),
    "single digits": lambda: byte_level(None, pre_tokenizers.Digits(individual_digits=True)),
    "numbers": lambda: byte_level(None, pre_tokenizers.Digits()),
    "lower case": lambda: normalized(
        byte_level(), normalizers.Lowercase(), *added("<TOOL>", "<tool_call>", normalized=True)
    ),
    "Llama 2": lambda: normalized(pieces("bpe", pre_tokenizer=None), LLAMA2, *added("<tool_call>", normalized=True)),
    "Gemma": lambda: pieces(
        "bpe", normalizer=Replace(" ", "▁"), pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    **{
        f"{kind}, Metaspace {scheme}, {'split' if is_split else 'whole'}": functools.partial(
            pieces, kind, pre_tokenizer=Metaspace(prepend_scheme=scheme, split=is_split)
        )
        for kind, scheme, is_split in itertools.product(("bpe", "unigram"), ("first", "always", "never"), (True, False))
    },
    "Metaspace decoder": lambda: pieces("bpe", decoder=decoders.Metaspace()),
    "Metaspace decoder, never": lambda: pieces("unigram", decoder=decoders.Metaspace(prepend_scheme="never")),
    "spaces dropped": lambda: pieces(
        "bpe", pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), Metaspace()])
    ),
    "unknown in BPE": lambda: pieces("bpe", falls_back=False),
    "unknown in unigram": lambda: pieces("unigram", falls_back=False),
    "words": words,
    **{
        f"split {behavior}{', inverted' * invert}": functools.partial(
            split, Regex(r"[\s\p{P}]"), behavior, invert=invert
        )
        for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous")
        for invert in (False, True)
    },
    "letters": lambda: pieces("bpe", normalizer=Replace(Regex(r"\s+"), "▁"), pre_tokenizer=None),
    "prefix space": lambda: _with_prefix_space(),
}


def _with_prefix_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_tokens(added("<tool>"))
    return tokenizer


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """As models read prompts."""
    return plain_tokenizer(KINDS[name]().to_str())


def random_texts(seed: int, number: int) -> list[str]:
    """Texts of ordinary pieces, odd characters, and any characters of all general categories."""
    numbers = random.Random(seed)
    by_category: dict[str, list[str]] = {}
    for code in [*range(0xD800), *range(0xE000, 0x30000, 3), *range(0x30000, 0x110000, 997)]:
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    categories = sorted(by_category)

    def piece() -> str:
        kind = numbers.random()
        if kind < 0.4:
            start = numbers.randrange(300)
            return TRAINED_ON[start : start + numbers.randrange(8)]
        return numbers.choice(ODD if kind < 0.75 else by_category[numbers.choice(categories)])

    return ["".join(piece() for _ in range(numbers.randrange(12))) for _ in range(number)]


def random_ids(tokenizer: Tokenizer, seed: int, number: int) -> list[list[int]]:
    """Tokens in any order, and those of texts with some left out, so that characters are broken."""
    numbers, size = random.Random(seed), tokenizer.get_vocab_size()
    alone = [[numbers.randrange(size) for _ in range(numbers.randrange(20))] for _ in range(number // 2)]
    texts = random_texts(seed + 1, number - len(alone))
    kept = [[token for token in tokenizer.encode(text).ids if numbers.random() < 0.8] for text in texts]
    return alone + kept
