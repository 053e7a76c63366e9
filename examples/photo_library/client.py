"""What a photo library asks for each photo, and for each search: python examples/photo_library/client.py [ADDRESS].

Photos are random pixels here, and so are the weights. The calls, their sizes and their order are a library's.
"""

import sys
import time

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

SIDE = 640
Array = NDArray[np.float32]


class Library:
    def __init__(self, address: str) -> None:
        self.client = triton.InferenceServerClient(address)

    def ask(self, model: str, output: str, **inputs: NDArray[np.generic]) -> Array:
        sent = []
        for name, values in inputs.items():
            sent.append(triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)))
            sent[-1].set_data_from_numpy(values)
        start_s = time.perf_counter()
        found: Array = self.client.infer(model, sent).as_numpy(output)
        print(f"{model:16}{(time.perf_counter() - start_s) * 1e3:7.1f} ms   {output} {list(found.shape)}")
        return found

    def add(self, photo: Array) -> Array:
        """Return the photo's embedding, after its faces and its text have been read."""
        scores = self.ask("face_detector", "scores", image=photo)
        row, column = divmod(
            int(scores.reshape(-1, 2).max(1)[: 80 * 80].argmax()), 80
        )  # the place on the finest grid
        top, left = (min(8 * place, SIDE - 112) for place in (row, column))
        self.ask(
            "face_embedder", "output", input=np.ascontiguousarray(photo[:, :, top : top + 112, left : left + 112])
        )
        self.ask("ocr_detector", "text", image=np.pad(photo, ((0, 0), (0, 0), (0, 96), (0, 96))))
        self.ask("ocr_recognizer", "characters", line=np.ascontiguousarray(photo[:, :, :48, :320]))
        return self.ask("clip_image", "embedding", x=np.ascontiguousarray(photo[:, :, :448:2, :448:2]))


def main() -> None:
    draws = np.random.default_rng(0)
    library = Library(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000")
    photos = [library.add(draws.random((1, 3, SIDE, SIDE), np.float32)) for _ in range(3)]
    query = library.ask("clip_text", "embedding", x=draws.integers(1, 49_000, (1, 77)))
    cosines = [float((query @ photo.T).item() / np.linalg.norm(query) / np.linalg.norm(photo)) for photo in photos]
    print("cosines of the search:", *(f"{cosine:.3f}" for cosine in cosines))


if __name__ == "__main__":
    main()
