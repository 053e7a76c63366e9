"""Query a served model with tritonclient: read its metadata, and send one request of random values over HTTP.

    python examples/client.py scorer localhost:8000

`tritonclient.grpc` has the same calls for port 8001.
"""

import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import triton_to_np_dtype


def main() -> int:
    model, address = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "localhost:8000"
    client = triton.InferenceServerClient(address)
    metadata = client.get_model_metadata(model)
    inputs = []
    for tensor in metadata["inputs"]:
        shape = [max(size, 1) for size in map(int, tensor["shape"])]  # a dynamic dimension is -1
        # The metadata has the range of an input that indexes a table.
        most = tensor.get("parameters", {}).get("maximum", 1)
        values = np.random.default_rng(0).uniform(0, most, shape).astype(triton_to_np_dtype(tensor["datatype"]))
        inputs.append(triton.InferInput(tensor["name"], shape, tensor["datatype"]))
        inputs[-1].set_data_from_numpy(values)  # as bytes; JSON does not accept large tensors
    # The timeout is in microseconds. A request that cannot be answered in time is refused at once, with status 503.
    answer = client.infer(model, inputs, timeout=1_000_000)
    for output in metadata["outputs"]:
        print(output["name"], answer.as_numpy(output["name"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
