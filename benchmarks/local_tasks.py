#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Three lm-eval tasks that need no network: prose, facts and last words.

    python benchmarks/local_tasks.py FOLDER
    python benchmarks/accuracy.py MODEL --include-path FOLDER --tasks local_prose ...

local_prose: perplexity over the data set descriptions that scikit-learn ships
(BSD-3-Clause; lm-eval depends on scikit-learn). local_facts (multiple choice) and
local_last_word (generation) are written here, the same every time.
"""
import json
import random
import sys
from pathlib import Path

CAPITALS = dict(
    France="Paris", Italy="Rome", Spain="Madrid", Germany="Berlin", Japan="Tokyo",
    China="Beijing", Russia="Moscow", Egypt="Cairo", Greece="Athens", Portugal="Lisbon",
    Austria="Vienna", Poland="Warsaw", Hungary="Budapest", Sweden="Stockholm", Norway="Oslo",
    Denmark="Copenhagen", Finland="Helsinki", Ireland="Dublin", Canada="Ottawa", Cuba="Havana",
    Peru="Lima", Chile="Santiago", Kenya="Nairobi", India="New Delhi", Iran="Tehran",
    Iraq="Baghdad", Thailand="Bangkok", Vietnam="Hanoi", Turkey="Ankara", Belgium="Brussels")
OPPOSITES = dict(
    hot="cold", big="small", fast="slow", light="dark", happy="sad", early="late", wet="dry",
    open="closed", full="empty", hard="soft", high="low", left="right", strong="weak",
    rich="poor", young="old", loud="quiet", clean="dirty", near="far", thick="thin",
    sweet="bitter", deep="shallow", heavy="weightless", rough="smooth", sharp="blunt",
    wide="narrow", brave="timid", true="false", alive="dead", awake="asleep", cheap="expensive")
KINDS = dict(
    oak="tree", rose="flower", salmon="fish", eagle="bird", hammer="tool", violin="instrument",
    carrot="vegetable", apple="fruit", shirt="garment", iron="metal", diamond="gem", ant="insect",
    chess="game", tennis="sport", triangle="shape", purple="color", winter="season",
    Tuesday="day", April="month", Mars="planet", doctor="profession", bread="food",
    milk="drink", chair="piece of furniture", truck="vehicle", Latin="language",
    cobra="snake", poodle="dog", novel="book", kilogram="unit of mass")
QUESTIONS = (("What is the capital of {}?", CAPITALS), ("What is the opposite of {}?", OPPOSITES),
             ("What kind of thing is {}?", KINDS))
WORDS = ("river stone lamp garden window bridge candle forest market bottle hammer letter "
         "mirror pencil basket ladder ribbon saddle tunnel wagon anchor blanket copper feather "
         "island jacket kettle lantern meadow needle orchard pillow rocket shadow").split()


def prose():
    """Pieces of about 1,200 characters of running text."""
    import sklearn.datasets
    folder = Path(sklearn.datasets.__file__).parent / "descr"
    for path in sorted(folder.glob("*.rst")):
        piece = ""
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            piece += paragraph.strip() + "\n\n"
            if len(piece) > 1200:
                yield dict(text=piece.strip())
                piece = ""


def facts():
    """Each fact with four sets of three wrong answers."""
    rng = random.Random(0)
    for question, table in QUESTIONS:
        for subject, answer in table.items():
            for _ in range(4):
                wrong = rng.sample(sorted(set(table.values()) - {answer}), 3)
                choices = rng.sample([answer, *wrong], 4)
                yield dict(question=question.format(subject), choices=choices,
                           label=choices.index(answer))


def last_words():
    """Lists of words whose last one is asked for, with two examples ahead."""
    rng = random.Random(1)

    def line(count):
        words = rng.sample(WORDS, count)
        return "Words: " + ", ".join(words) + "\nLast word:", words[-1]
    for number in range(240):
        shots = [line(3 + number % 5) for _ in range(2)]
        text, answer = line(3 + number % 5)
        yield dict(text="".join(f"{t} {a}\n\n" for t, a in shots) + text, answer=answer)


TASKS = dict(
    local_prose=(prose, dict(
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[dict(metric="word_perplexity"), dict(metric="byte_perplexity")])),
    local_facts=(facts, dict(
        output_type="multiple_choice", doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_choice="{{choices}}", doc_to_target="{{label}}",
        metric_list=[dict(metric="acc")])),
    local_last_word=(last_words, dict(
        output_type="generate_until", doc_to_text="{{text}}", doc_to_target="{{answer}}",
        generation_kwargs=dict(until=["\n"], max_gen_toks=8, do_sample=False),
        # The answer follows the prompt's colon with a space.
        filter_list=[dict(name="stripped", filter=[dict(function="remove_whitespace"),
                                                   dict(function="take_first")])],
        metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True,
                          ignore_case=True, ignore_punctuation=True)])))


def write(folder):
    """Write data and task files into `folder`; returns the task names."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, (items, task) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items()))
        # JSON is YAML, so no YAML library is needed.
        (folder / f"{name}.yaml").write_text(json.dumps(dict(
            task=name, dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(data))),
            test_split="test", num_fewshot=0, metadata=dict(version=1), **task), indent=1))
    return list(TASKS)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(*write(sys.argv[1]))
