"""GenEval 2: Soft-TIFA as in its authors' program, on a judge of random weights and on a judge with given answers."""

import dataclasses
import json

import numpy as np
import pandas as pd
import published
import pytest
import torch
from scipy.stats import gmean

from specbench.errors import SpecbenchError
from specbench.metrics.base import Sample
from specbench.metrics.geneval2 import GenEval2, QwenJudge, right_answers

META = {key: published.GENEVAL2[key] for key in ("vqa_list", "skills")}
TOYS = Sample("000", 0, "two metal toys", "3 atoms", META, np.zeros((8, 8, 3), np.uint8))


def answering(values):
    metric = GenEval2()
    left = iter(values)
    metric.judge = lambda pixels, question, answers: next(left)
    return metric


def test_the_geometric_mean_is_of_prompts_and_the_arithmetic_one_of_atoms_and_skills():
    atoms = [[0.9, 0.4], [0.5, 1.0]]
    metric = answering([*atoms[0], *atoms[1]])
    rows = metric.features([TOYS, dataclasses.replace(TOYS, prompt_id="001")])
    frame = pd.DataFrame(rows).assign(prompt_id=["000", "001"], category=["3 atoms", "4 atoms"])
    scores = {score.name.partition(":")[2]: score.estimate.value for score in metric.scores(frame)}
    assert {score.n for score in metric.scores(frame)} == {1, 2}, "images, not atoms"
    assert scores[""] == pytest.approx(np.mean([gmean(row) for row in atoms]))
    assert scores["atoms"] == pytest.approx(np.mean(atoms))
    assert (scores["3 atoms"], scores["4 atoms"]) == (pytest.approx(gmean(atoms[0])), pytest.approx(gmean(atoms[1])))
    assert (scores["count"], scores["attribute"]) == (pytest.approx(0.7), pytest.approx(0.7))
    planted = answering([0.909, 0.404, 0.505, 1.0]).features([TOYS, TOYS])
    assert planted[0]["value"] == pytest.approx(1.01 * rows[0]["value"]) and json.loads(planted[0]["answers"])


def test_numbers_count_as_words_and_digits_all_else_as_yes_and_questions_need_skills():
    assert right_answers("How many toys are in the image?", "two") == ("two", "Two", " two", " Two", "2", " 2")
    assert right_answers("Are the toys metal?", "Yes") == ("Yes", "yes", " yes", " Yes")
    with pytest.raises(SpecbenchError, match="2 questions and 1 skills"):
        answering([1, 1]).features([dataclasses.replace(TOYS, meta=META | {"skills": ["count"]})])


class Inputs(dict):
    def to(self, device):
        return self


class Processor:
    """A tokenizer with an id per word, without a picture."""

    tokenizer = type("T", (), {"encode": staticmethod(lambda text: [3 + sum(map(ord, text)) % 40])})

    def apply_chat_template(self, messages, **_):
        text = messages[0]["content"][1]["text"]
        ids = torch.tensor([[self.tokenizer.encode(word)[0] for word in text.split()]])
        return Inputs(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_the_judge_gives_the_first_token_probabilities_that_generate_scores():
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**width, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()
    processor = Processor()
    value = QwenJudge(model, processor)(TOYS.pixels, "Are the toys metal?", ("Yes", "yes"))
    inputs = processor.apply_chat_template([{"content": [None, {"text": "Are the toys metal? Answer in one word."}]}])
    out = model.generate(**inputs, max_new_tokens=1, do_sample=False, output_scores=True, return_dict_in_generate=True)
    shares = out.scores[0].softmax(-1)[0]
    assert value == pytest.approx(sum(shares[processor.tokenizer.encode(word)[0]].item() for word in ("Yes", "yes")))
