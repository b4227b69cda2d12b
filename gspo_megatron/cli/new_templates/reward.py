"""The reward of this run: config.yaml names it as `reward.import_path: reward:reward`.

The run calls it once for each response. It returns a number; a higher number is better. `sample`
has

    sample.prompt      the prompt; if it is messages, the text of the last user message
    sample.messages    the prompt as messages
    sample.response    what the model wrote, without the end-of-sequence token
    sample.answer      the field `answer` of the prompt's row
    sample.fields      all other fields of the row
    sample.truncated   whether the response was cut off at rollout.max_response_tokens
    sample.num_tokens  the number of tokens of the response

Keyword arguments are options: `reward.options: {partial: 0.1}` in config.yaml.
"""

import re


def reward(sample, partial: float = 0.2) -> float:
    """Return 1 if the last number of the response is the answer. Otherwise return `partial` times
    the share of digits in the response. This helps a model that never answers right. Set `partial`
    to 0 for a model that sometimes answers right."""
    numbers = re.findall(r"\d+", sample.response)
    if numbers and numbers[-1] == sample.answer:
        return 1.0
    digits = sum(character.isdigit() for character in sample.response)
    return partial * digits / max(len(sample.response), 1)
