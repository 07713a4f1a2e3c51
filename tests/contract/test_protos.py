"""The protos, the code generated from them and the core's vocabulary agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc_testing
import pytest
from google.protobuf import descriptor_pb2

from kvc.core import types as core
from kvc.v1 import admission_pb2, admission_pb2_grpc, types_pb2
from scripts import protos

if TYPE_CHECKING:
    import enum
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

# Field numbers of descriptor.proto, as they appear in the paths of comments.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES, CHILDREN = 4, 5, 6, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    """The protos of the project with their comments."""
    out = tmp_path_factory.mktemp("descriptors") / "all.binpb"
    sources = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", "--include_source_info", f"--descriptor_set_out={out}"]
    subprocess.run([*command, *sources], check=True)
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def test_the_committed_code_is_what_the_generator_makes() -> None:
    assert protos.differences(protos.generate()) == []


def test_a_stale_a_missing_and_a_left_over_file_are_named(tmp_path: Path) -> None:
    made = {Path("kvc/v1/one_pb2.py"): b"new", Path("kvc/v1/two_pb2.py"): b"two"}
    protos.write({Path("kvc/v1/one_pb2.py"): b"old", Path("kvc/v1/three_pb2.pyi"): b"three"}, tmp_path)
    assert protos.differences(made, tmp_path) == [
        "kvc/v1/one_pb2.py: differs from what the generator makes",
        "kvc/v1/two_pb2.py: missing",
        "kvc/v1/three_pb2.pyi: belongs to no proto",
    ]
    protos.write(made, tmp_path)
    assert protos.differences(made, tmp_path) == []
    assert not (tmp_path / "kvc/v1/three_pb2.pyi").exists()


def test_the_generated_code_can_be_imported_beside_protobuf_6() -> None:
    """An engine's process may have protobuf 6: code of a later generator could not be imported there."""
    versions = {re.search(r"Protobuf Python Version: (\d+)\.", path.read_text()) for path in (ROOT / "kvc/v1").glob("*_pb2.py")}
    assert {found and int(found[1]) for found in versions} == {6}


def test_everything_declared_is_explained(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    declared = [f"{file.name}: {name}" for file in files for name, _ in _declarations(file)]
    silent = [f"{file.name}: {name}" for file in files for name, comment in _declarations(file) if not comment.strip()]
    assert silent == []
    assert len(declared) > 200


@pytest.mark.parametrize("kind", [core.Role, core.Mode, core.Executor, core.Reason])
def test_enums_of_the_core_and_of_the_wire_have_the_same_members(kind: type[enum.Enum]) -> None:
    wire = types_pb2.DESCRIPTOR.enum_types_by_name[kind.__name__]
    prefix = f"{kind.__name__.upper()}_"
    assert [value.name for value in wire.values] == [f"{prefix}UNSPECIFIED", *(f"{prefix}{member.name}" for member in kind)]


def test_each_reason_names_its_string(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    comments = dict(declaration for file in files for declaration in _declarations(file))
    for reason in core.Reason:
        assert comments[f"Reason.REASON_{reason.name}"].lstrip().startswith(f'"{reason.value}":')


def _get_worker(_: object, request: admission_pb2.GetWorkerRequest, context: grpc.ServicerContext) -> admission_pb2.GetWorkerResponse:
    context.set_trailing_metadata((("seen", type(request).__name__),))
    worker = types_pb2.WorkerRef(worker_id="d0", epoch=7)
    return admission_pb2.GetWorkerResponse(info=types_pb2.WorkerInfo(worker=worker, role=types_pb2.ROLE_DECODE))


def test_a_generated_servicer_answers_through_its_service_descriptor() -> None:
    """The descriptor, the generated servicer and the messages fit together, without a socket (grpcio-testing)."""
    servicer = type("OneWorker", (admission_pb2_grpc.AdmissionServiceServicer,), {"GetWorker": _get_worker})()
    service = admission_pb2.DESCRIPTOR.services_by_name["AdmissionService"]
    server = grpc_testing.server_from_dictionary({service: servicer}, grpc_testing.strict_real_time())
    call = server.invoke_unary_unary(service.methods_by_name["GetWorker"], (), admission_pb2.GetWorkerRequest(), 10.0)
    response, trailing, code, _ = call.termination()
    assert code is grpc.StatusCode.OK
    assert ("seen", "GetWorkerRequest") in trailing
    assert (response.info.worker.worker_id, response.info.worker.epoch, response.info.role) == ("d0", 7, types_pb2.ROLE_DECODE)


def _declarations(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Name and comment of each message, field, enum, value, service and method of a file."""
    comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
    groups = (
        (FILE_MESSAGES, [(message.name, [field.name for field in message.field]) for message in file.message_type]),
        (FILE_ENUMS, [(kind.name, [value.name for value in kind.value]) for kind in file.enum_type]),
        (FILE_SERVICES, [(service.name, [method.name for method in service.method]) for service in file.service]),
    )
    for number, parents in groups:
        for index, (parent, children) in enumerate(parents):
            yield parent, comments.get((number, index), "")
            for position, child in enumerate(children):
                yield f"{parent}.{child}", comments.get((number, index, CHILDREN, position), "")
