"""Load an exported model with plain transformers, no LightRL, and ask it a few sums.

    OMP_WAIT_POLICY=passive python examples/load_export.py runs/quickstart/export

(Threads that wait sleep, instead of taking the cores from other programs: up to three times faster on a busy machine.)
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

SUMS = ["What is 3 + 4?", "What is 9 - 5?", "What is 6 + 8?", "What is 2 - 7?", "What is 0 + 5?"]


def main(folder: str) -> None:
    """Print the greedy answers of the model in `folder`."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for question in SUMS:
        messages = [{"role": "system", "content": "Answer with a number only."}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{question:16} {answer}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/load_export.py FOLDER")
    main(sys.argv[1])
