"""The main job: generate text with a real model from one command; `paged-jax generate` is the same.

python examples/generate.py "What is gravity? Answer in one sentence."
python examples/generate.py --model path/to/Qwen3-0.6B "What is gravity?"
"""

import sys

from paged_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
