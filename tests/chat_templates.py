"""Chat templates of the kinds that exist, each as small as it can be, and a byte-level tokenizer for them.

The tokens and their order are those of the named format; what a kind does besides (drop thoughts, move the system
message, merge turns) is written as briefly as possible.
"""

from __future__ import annotations

from typing import Any

LOOP = "{% for m in messages %}"
END = "{% endfor %}"

CHATML = (
    LOOP + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
NO_PROMPT = LOOP + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}" + END
MARKED = (
    LOOP + "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    + END + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
MARKED_WITH_END = MARKED.replace(
    "{% endgeneration %}{{ '<|im_end|>\n' }}", "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
)
# thoughts stay only behind the last question, where an empty one is written if there is none
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + LOOP + "{% set text = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
    "{% if loop.index0 > ns.last %}{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "{{ '<s>' }}" + LOOP + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
    "+ '<|eot_id|>' }}" + END
    + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)  # fmt: skip
GEMMA = (
    "{{ '<s>' }}" + LOOP + "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim "
    "+ '<end_of_turn>\n' }}" + END + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
# the system message goes into the last question, but only where that ends the conversation; no role, no prompt
MISTRAL = (
    "{% set ns = namespace(system='') %}{{ '<s>' }}" + LOOP + "{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] + '\n\n' %}{% elif m['role'] == 'user' %}"
    "{{ '[INST] ' + (ns.system if loop.last else '') + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + '</s>' }}{% endif %}" + END
)
# nothing ends an answer but the role that follows
GLM = (
    "{{ '[gMASK]<sop>' }}" + LOOP + "{{ '<|' + m['role'] + '|>\n' + m['content'] }}" + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)  # fmt: skip
# earlier and later thoughts are dropped, and the prompt opens one
DEEPSEEK = (
    "{{ '<s>' }}" + LOOP + "{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '</s>' }}"
    "{% else %}{{ m['content'] }}{% endif %}" + END
    + "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)  # fmt: skip
# a token of its own ends the whole conversation
PHI3 = (
    LOOP + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}" + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '</s>' }}{% endif %}"
)  # fmt: skip
# channels; what ends the last answer differs from what ends earlier ones
HARMONY = (
    LOOP + "{% if m['role'] == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] "
    "+ ('<|return|>' if loop.last else '<|end|>') }}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}" + END
    + "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)  # fmt: skip
# successive messages of one role become one
MERGING = (
    LOOP + "{% if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != m['role'] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% else %}{{ '\n' }}{% endif %}{{ m['content'] }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != m['role'] %}{{ '<|im_end|>\n' }}{% endif %}" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
# tools: calls are written out, results need them
TOOLS = (
    LOOP + "{% if m['role'] == 'tool' and not messages[loop.index0 - 1]['tool_calls'] %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['name'] + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}" + END + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
# no special tokens at all
PLAIN = (
    LOOP + "{{ ('Question: ' if m['role'] == 'user' else 'Answer: ') + m['content'] + '\n' }}" + END
    + "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)  # fmt: skip
# an answer is written twice, and no prompt tells what of it is the role's
TWICE = LOOP + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + m['content'] + '<|im_end|>' }}" + END

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|User|>",
    "<|Assistant|>", "<think>", "</think>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>",
    "<tool_call>", "</tool_call>", "[INST]", "[/INST]",
]  # fmt: skip


def tokenizer(template: str, **options: Any) -> Any:
    """Bytes, a few merges (line feeds and leading spaces among them), and the special tokens of all formats.

    `trim_offsets` and `rstrip` are what some families' tokenizers do: leave spaces out of offsets, and take white space
    along with a special token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s"), ("h", "i"), ("a", "s"), ("as", "s")]
    tokens = {token: i for i, token in enumerate([*vocabulary, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(tokens, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=options.get("trim_offsets", False))
    made.add_special_tokens([AddedToken(t, special=True, rstrip=options.get("rstrip", False)) for t in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast
