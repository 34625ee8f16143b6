"""Certificates for tests: authorities, and certificates that they have signed."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def credentials_of_ca(folder, name):
    """Credentials for this machine, in files; a new CA of this name has signed the certificate."""
    from replicax._src.cluster.credentials import (
        Credentials,
    )  # benchmarks use the files with older versions too

    return Credentials(**files_of_ca(folder, name))


def files_of_ca(folder, name):
    """The same, as paths by the names of ``Credentials``."""

    def write(name, data):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(data)
        return str(folder / name)

    ca, ca_key = _certificate(f"ca {name}")
    certificate, key = _certificate(name, ca, ca_key)
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return {
        "ca_file": write(f"{name}.ca", ca.public_bytes(pem)),
        "certificate_file": write(f"{name}.crt", certificate.public_bytes(pem)),
        "key_file": write(f"{name}.key", key.private_bytes(pem, *form)),
    }


def _certificate(name, issuer=None, issuer_key=None):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(issuer_key or key, hashes.SHA256())
    )
    return certificate, key
