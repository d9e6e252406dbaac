"GRPO for GLM-Image, written as notebooks."
__version__ = "0.1.0"
