# Cohabit in a container.
#   docker build -t cohabit .
# takes torch from pip's configured index. For a certain build of torch name the index that has it, and for a GPU
# the extra that goes with it:
#   docker build --build-arg TORCH_INDEX=<index of torch builds> [--build-arg EXTRAS=cuda] -t cohabit .
# Run it with a model repository and a memory cap:
#   docker run -p 8000:8000 -p 8001:8001 -p 8002:8002 -v ./models:/models:ro -v cohabit-cache:/cache cohabit \
#       serve /models --memory 2GiB --host 0.0.0.0
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=
ARG EXTRAS=
WORKDIR /src
RUN python -m venv /opt/cohabit
ENV PATH=/opt/cohabit/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
# `cohabit` links to the other four.
COPY cohabit cohabit
COPY planner planner
COPY runtime runtime
COPY server server
COPY loadgen loadgen
RUN pip install -c constraints.txt ".${EXTRAS:+[${EXTRAS}]}"
# The planner's inner loops are compiled at first use; doing it here spares every container's first start.
ENV NUMBA_CACHE_DIR=/opt/numba
RUN python -c "from cohabit.planner.warm import warm; warm()"

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --home-dir /cache --create-home cohabit
COPY --from=build /opt/cohabit /opt/cohabit
# Read only; the first server copies it to the cache, where code for other processors is added.
COPY --from=build /opt/numba /opt/numba
ENV PATH=/opt/cohabit/bin:$PATH NUMBA_CACHE_DIR=/opt/numba XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
USER cohabit
VOLUME ["/cache"]
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["cohabit"]
CMD ["serve", "/models", "--memory", "50%", "--host", "0.0.0.0"]
