# Targets: engine (the server and the command line), dashboard, locust. All run as uid 10001.

FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A torch that the base image already has is kept.
RUN python -m venv --system-site-packages /opt/quaver && /opt/quaver/bin/pip install --upgrade pip setuptools
WORKDIR /src
COPY requirements.lock ./
RUN /opt/quaver/bin/pip install --index-url "$TORCH_INDEX_URL" "$(grep '^torch==' requirements.lock)"
COPY pyproject.toml README.md LICENSE ./
# The dependencies alone, so that a change of the sources does not install them again.
RUN mkdir engine telemetry alerting chaos dashboards quaver \
    && touch engine/__init__.py telemetry/__init__.py alerting/__init__.py chaos/__init__.py dashboards/__init__.py quaver/__init__.py \
    && /opt/quaver/bin/pip install -c requirements.lock . \
    && /opt/quaver/bin/pip uninstall -y quaver && rm -rf build *.egg-info
COPY engine engine
COPY telemetry telemetry
COPY alerting alerting
COPY chaos chaos
COPY dashboards dashboards
COPY quaver quaver
RUN /opt/quaver/bin/pip install --no-deps .
# The native kernels for every instruction set; the running image needs no compiler.
RUN command -v g++ >/dev/null || { apt-get update && apt-get install -y --no-install-recommends g++; }
RUN cd / && /opt/quaver/bin/python -m engine.kernels.cpu.build
ARG QUAVER_MODEL=smollm2-135m
RUN QUAVER_MODEL_CACHE=/opt/models QUAVER_MODEL=$QUAVER_MODEL /opt/quaver/bin/quaver model pull

FROM python:3.11-slim-bookworm AS engine
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin quaver \
    && install -d -o quaver -g quaver -m 0750 /var/lib/quaver \
    && install -d -o quaver -g quaver -m 0700 /var/lib/quaver-keys \
    && install -d -o quaver -g quaver -m 0755 /etc/quaver/generated /alertmanager
COPY --from=build /opt/quaver /opt/quaver
COPY --from=build /opt/models /opt/models
ENV PATH=/opt/quaver/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QUAVER_HOST=0.0.0.0 \
    QUAVER_STATE_DIR=/var/lib/quaver \
    QUAVER_KEYS_DIR=/var/lib/quaver-keys \
    QUAVER_MODEL_CACHE=/opt/models
USER quaver
WORKDIR /home/quaver
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=90s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
CMD ["quaver", "serve"]

FROM engine AS dashboard
USER root
COPY requirements.lock /tmp/
RUN pip install --no-cache-dir -c /tmp/requirements.lock 'quaver[dashboard]' && rm /tmp/requirements.lock
USER quaver
EXPOSE 8501
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8501/_stcore/health', timeout=2)"]
CMD ["quaver", "dashboard", "--address", "0.0.0.0"]

FROM engine AS locust
USER root
COPY requirements.lock /tmp/
RUN pip install --no-cache-dir -c /tmp/requirements.lock 'quaver[load]' && rm /tmp/requirements.lock
USER quaver
EXPOSE 8089
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8089/', timeout=2)"]
CMD ["sh", "-c", "export QUAVER_KEY=$(cat \"$QUAVER_KEYS_DIR/client.key\") && exec locust -f \"$(python -c 'import chaos.load, os; print(os.path.dirname(chaos.load.__file__))')/locustfile.py\" --host http://engine:8000"]
