"""Three small tasks for lm-evaluation-harness, with their data, so the Hub isn't needed."""

import json
import pathlib

CHOICES = [
    {"q": "Grass is", "choices": ["green", "loud", "a Tuesday"], "gold": 0},
    {"q": "Two and two are ", "choices": ["four", "a river of milk"], "gold": 0},  # a space at its end
    {"q": "The opposite of hot is", "choices": ["cold", "hot", "colder than that"], "gold": 0},
    {"q": "Ice is frozen", "choices": ["fire", "water"], "gold": 1},
    {"q": "A day has twenty-four", "choices": ["hours", "minutes", "legs"], "gold": 0},
    {"q": "Fish live in" + " the sea, and the sea is deep, so fish live in" * 12, "choices": ["water", "fire"], "gold": 0},
]  # fmt: skip
TEXTS = [
    {"text": "It was the best of times, it was the worst of times, it was the age of wisdom."},
    {"text": "Ünïcödé, 日本語 and\n\n    four spaces. " * 9},
    {"text": "x"},
]
QUESTIONS = [
    {"question": "Q: What is the capital of France?\nA:", "answer": "Paris"},
    {"question": "Q: Count from one to five.\nA:", "answer": "one"},
]

TASKS = {
    "zoo_choice": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "zoo_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "zoo_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}
ROWS = {"zoo_choice": CHOICES, "zoo_text": TEXTS, "zoo_answer": QUESTIONS}


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes a folder for --include_path."""
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        about = f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{folder / "cache"}"}}
test_split: test
{task}
metadata: {{version: 1.0}}
"""
        (folder / f"{name}.yaml").write_text(about)
    return folder
