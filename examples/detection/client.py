"""Send an image to the ensemble, and print what it finds: python client.py [ADDRESS]."""

import sys

import numpy as np
import tritonclient.http as triton


def main() -> None:
    client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000")
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    answer = client.infer("find", [triton.InferInput("image", [480, 640, 3], "UINT8").set_data_from_numpy(image)])
    count = int(answer.as_numpy("count")[0])
    print(f"{count} objects are found:")
    for box, scores in zip(answer.as_numpy("boxes")[:count], answer.as_numpy("classes")[:count], strict=True):
        print(f"class {scores.argmax()} at", *(f"{place:.2f}" for place in box))


if __name__ == "__main__":
    main()
