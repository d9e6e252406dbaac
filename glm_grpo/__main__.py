"""`python -m glm_grpo` lists the programs of this package."""

import sys

PROGRAMS = {
    "train": "train GLM-Image with GRPO, or the small model of this package",
    "evaluate": "measure a checkpoint and its baseline on held-out prompts",
    "probe": "find out from a few hundred images whether a reward can teach a model anything",
    "remote": "serve a reward to a training, from its own environment or machine",
    "bench": "measure how fast this machine samples and trains",
}

if __name__ == "__main__":
    for name, summary in PROGRAMS.items():
        print(f"  python -m glm_grpo.{name:10} {summary}")
    print("\nEach one describes its options: --help.")
    if words := [word for word in sys.argv[1:] if word not in ("-h", "--help")]:
        print(f"\nerror: {words[0]}: name the program with a dot, as above.", file=sys.stderr)
        sys.exit(2)
