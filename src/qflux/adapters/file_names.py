"""What adapter files are called. No torch: whoever only looks for one should not wait for it."""

FILE_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers looks for in a folder."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What PEFT's `save_pretrained` writes."""
