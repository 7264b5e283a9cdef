#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model folder from a config.json alone, for measuring where no weights are.

    python benchmarks/random_model.py benchmarks/models/qwen3-32b.json [--layers N] [FOLDER]

vLLM makes the weights up (`--load-format dummy`). The tokenizer has one word a
token ("t0 t1 ..."), so a text of n words is a prompt of n tokens.
"""
import argparse
import json
import tempfile
from pathlib import Path


def write(config, folder=None, layers=None):
    """Write config.json and the tokenizer into `folder`; returns it.

    `config`: path of a config.json. `layers` overrides num_hidden_layers. Without a
    folder it is the same one every time: its name is part of the key of
    torch.compile's cache.
    """
    folder = Path(folder or Path(tempfile.gettempdir(),
                                 f"random-{Path(config).stem}-{layers or 'all'}"))
    values = json.loads(Path(config).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    if layers:
        values["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(values["vocab_size"])}, "t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
        model_max_length=values.get("max_position_embeddings", 40960),
        eos_token=f"t{values.get('eos_token_id', 0)}")))
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("folder", nargs="?", help="default: one below the temporary folder")
    parser.add_argument("--layers", type=int, help="instead of num_hidden_layers")
    options = parser.parse_args()
    print(write(options.config, options.folder, options.layers))


if __name__ == "__main__":
    main()
