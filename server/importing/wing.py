"""Importing models, by the name of its command."""

from cohabit.planner.parts import Part, Parts

PARTS: Parts = {
    "cohabit.commands": {
        "import": Part(
            "cohabit.server.commands.import_model",
            "make a repository entry of a Hugging Face or ONNX model, a torch.nn.Module or a checkpoint",
        )
    }
}
