"""Ten mistakes with the public names, each on a line that ends in `# mistake`; a type checker reads it, nobody runs it.

All would be found when the program runs, some of them after minutes.
"""

import vit_jax

run = vit_jax.load_run("runs/pets")
config = vit_jax.load_config("finetune:photos")

vit_jax.create_model("ViT-B/16", num_clases=10)  # mistake
vit_jax.create_model("ViT-B/16", pool="average")  # mistake
vit_jax.load("B_16.npz", image_size=384, registers="4")  # mistake
vit_jax.load_run("runs/pets", precision="bfloat16")  # mistake
run.export("m.onnx", bacth_size=8)  # mistake
run.evaluate("photos", eval__batchsize=64)  # mistake
run.save("pets.safetensors", format="tim")  # mistake
config.optim.learning_rate = 3  # mistake
vit_jax.default_config().data.image_size = 22.4  # mistake
print(run("cat.jpg").name)  # mistake
