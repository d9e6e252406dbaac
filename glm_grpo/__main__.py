"""`python -m glm_grpo` lists the programs of this package."""

import sys

PROGRAMS = {
    "train": "train GLM-Image with GRPO, or the small model of this package",
    "evaluate": "measure a checkpoint and its baseline on held-out prompts",
    "probe": "see from a few hundred images whether a reward can teach a model anything",
    "export": "write what was trained as a model that diffusers and other programs open",
    "remote": "serve a reward to a training, from its own environment or machine",
    "bench": "measure how fast this machine samples and trains",
}


def main(argv: list[str]) -> int:  # exit status
    "Print the programs. A word is a mistake: the programs are modules of their own."
    for name, summary in PROGRAMS.items():
        print(f"  python -m glm_grpo.{name:9} {summary}")
    print("\n--help describes the options of each.")
    words = [word for word in argv if word not in ("-h", "--help")]
    if words:
        program = words[0] if words[0] in PROGRAMS else "PROGRAM"
        print(f"\nerror: {words[0]}: write python -m glm_grpo.{program}", file=sys.stderr)
    return 2 if words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
