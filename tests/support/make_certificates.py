"""A CA and certificates for tests, made with the commands of docs/operations.md."""

import subprocess

_NEW = ["openssl", "req", "-x509", "-days", "2", "-newkey", "ec"]
_NEW += ["-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def make_ca(folder):
    """ca.pem and ca.key in a new folder."""
    folder.mkdir()
    command = [*_NEW, "-subj", "/CN=CA of a test", "-keyout", folder / "ca.key"]
    subprocess.run([*command, "-out", folder / "ca.pem"], check=True, capture_output=True)


def make_certificate(folder, names="DNS:localhost,IP:127.0.0.1"):
    """tls.crt and tls.key, of the CA in that folder."""
    command = [*_NEW, "-subj", "/CN=store", "-addext", f"subjectAltName={names}"]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"]
    command += ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run(command, check=True, capture_output=True)
