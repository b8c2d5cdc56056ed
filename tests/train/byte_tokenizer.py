"""A tokenizer of single bytes, as the tokenizers package saves it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def byte_tokenizer(*, begins: bool) -> Tokenizer:
    """Makes a tokenizer of 259 tokens: <unk>, <s>, </s> and all bytes.

    Args:
      begins: every text begins with <s>, as with a Llama.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *letters]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    made.add_special_tokens(names[:3])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return made
