"GRPO for GLM-Image, written as notebooks."
__version__ = "0.1.0"

# The names most people need; the rest is in the rooms (glm_grpo.tokens, glm_grpo.rewards, ...).
from glm_grpo.advantages import compute_advantages
from glm_grpo.data import I2IDataset, T2IDataset, make_dataloader, pil_to_tensor, tensor_to_pil
from glm_grpo.glm import GLMImageWrapper
from glm_grpo.loss import compute_grpo_loss
from glm_grpo.rewards import edit_reward, sign_reward, simple_reward_function
from glm_grpo.sde import sde_step
from glm_grpo.trainer import MinimalGRPOTrainer
