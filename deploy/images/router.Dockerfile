# syntax=docker/dockerfile:1
# The router and the command line, for any CPU. From the top of the repository:
#
#     docker build -f deploy/images/router.Dockerfile -t ecshare-router:0.1.0 .
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY ecshare ecshare
COPY kvshare kvshare
RUN python -m venv --without-pip /opt/ecshare \
    && python -m pip --python /opt/ecshare install --no-cache-dir --no-compile \
        --constraint constraints.txt \
        ".[router,cli,s3]"

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/ecshare /opt/ecshare
ENV PATH=/opt/ecshare/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number, because Kubernetes cannot see that a name is not root (runAsNonRoot).
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000
# For Docker and Compose; Kubernetes has probes of its own. Commands other than the router: disable.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/live', timeout=2)"]
ENTRYPOINT ["ecshare"]
CMD ["--help"]
