"""What is minimised: the draw of noise and timestep, the losses, and their normalisation over a step."""

from qflux.losses.mse import AttentionMaskMseLoss, MaskEditLoss, MseLoss
from qflux.losses.objective import Objective
from qflux.ragged.patches import mask_to_tokens as map_mask_to_latent

__all__ = ["AttentionMaskMseLoss", "MaskEditLoss", "MseLoss", "Objective", "map_mask_to_latent"]
