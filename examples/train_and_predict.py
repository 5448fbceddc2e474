"""Train a LoRA and edit a picture with it, in one program.

python examples/train_and_predict.py recipes/demo.yaml photo.jpg "make it red"
"""

import sys

from PIL import Image

from qflux import Trainer, load_config

config, picture, prompt = sys.argv[1:]
trainer = Trainer(load_config(config, ["run_name=example"]))
trainer.cache()
result = trainer.fit(lambda report: print(f"step {report.step} of {report.total_steps}: loss {report.loss:.4f}"))
print(f"held-out loss {result.held_out_loss}, {result.coverage}, LoRA: {result.adapter}")
(edited,) = trainer.predict([[Image.open(picture)]], [prompt], lora=result.adapter)
edited.save("edited.png")
