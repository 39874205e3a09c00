"""`doctor`: everything that makes a pool miss in silence, looked at before serving."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool_connector.cli.deployment import deployments
from kvpool_connector.cli.endpoint import MasterEndpoint
from kvpool_connector.cli.finding import Finding, Level, attempt, error, skipped, warning, well
from kvpool_connector.cli.inventory import read_descriptors, take_inventory
from kvpool_connector.cli.machine import machine_findings, ports
from kvpool_connector.cli.output import Answer, Exit, Rows, in_bytes
from kvpool_connector.cli.roundtrip import NAMESPACE, own_keys, round_trip
from kvpool_connector.cli.session import Session
from kvpool_connector.cli.shapes import NamedCache
from kvpool_connector.config import DEFAULT_TENANT, PoolSettings, StoreSettings
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.epoch import newest_epoch
from kvpool_connector.hashing import SECRET, read_hashing

SLOW_BYTES_PER_S = 100e6
"""A transfer slower than this is taken for a fault; reads over TCP must fit the lease at this speed."""
NUM_CHECKS = 15
STORE_CHECKS = ("client", "registration", "self-test", "lease", "hashes", "namespace")


@dataclass
class Checkup:
    """What to look at."""

    session: Session
    pool: PoolSettings = field(default_factory=PoolSettings)
    num_ranks: int = 1
    model: str = "deepseek-v3.2"
    num_blocks: int = 4

    def findings(self) -> Iterator[Finding]:
        """One finding a check, as soon as it is known."""
        settings: StoreSettings | None = None
        try:
            settings = self.session.store_settings()
            words = [f"master {settings.master_server_address}", f"protocol {settings.protocol}"]
            changed = self.pool.model_dump(exclude_defaults=True)
            words += [f"{name} {json.dumps(value)}" for name, value in changed.items()]
            yield well("configuration", ", ".join(words))
        except ConfigError as failure:
            yield error("configuration", "the store's settings are wrong", "no engine starts with them", str(failure))
        yield from machine_findings(settings, self.pool, self.num_ranks, self.session.environ)
        if settings is None:
            yield from (skipped(name, "no configuration") for name in ("ports", "endpoint", "tenant", *STORE_CHECKS))
            return
        yield ports(settings, self.session.knock)
        endpoint = attempt("endpoint", self._endpoint, "ls, stat, verify and explain need it")
        yield endpoint
        if endpoint.level is Level.ERROR:
            yield skipped("tenant", "no endpoint")
        else:
            yield attempt("tenant", lambda: self._tenant(settings), "who is kept apart is not known")
        try:
            with self.session.store(self.pool) as store:
                yield well("client", "a client that gives no memory reached the master")
                yield from self._with_store(store, settings, has_endpoint=endpoint.level is not Level.ERROR)
        except StoreSetupError as failure:
            yield error("client", "no client could join", "no engine will either", str(failure))
            yield from (skipped(name, "no client") for name in STORE_CHECKS[1:])

    def _endpoint(self) -> Finding:
        endpoint: MasterEndpoint = self.session.master_endpoint()
        segments = endpoint.segments()
        if not segments:
            return warning(
                "endpoint",
                f"the master at {endpoint.address} has no memory",
                "nothing can be stored before an engine (or another client) gives some",
                "start an engine with a global_segment_size above 0; before the first one this is normal",
            )
        total, used = sum(s.num_bytes for s in segments), sum(s.used_bytes for s in segments)
        return well("endpoint", f"{len(segments)} segments, {in_bytes(used)} of {in_bytes(total)} in use")

    def _tenant(self, settings: StoreSettings) -> Finding:
        tenant, known = settings.tenant_id, self.session.master_endpoint().tenants()
        if known is None and tenant == DEFAULT_TENANT:
            return well("tenant", "the master keeps no tenants apart, and none is set")
        if known is None:
            return warning(
                "tenant",
                f"tenant_id is {tenant!r}, and this master keeps no tenants apart",
                "whoever reaches the master shares the pool, whatever its tenant_id",
                "start mooncake_master with --enable_multi_tenants and a policy that names the tenant, or keep "
                "deployments apart with namespace",
            )
        if tenant in known:
            return well("tenant", f"{tenant!r} may store")
        return error(
            "tenant",
            f"tenant_id is {tenant!r}; the master's policy knows {', '.join(map(repr, known[:8])) or 'none'}",
            "every store is refused",
            "name the tenant in the master's policy of quotas, or set tenant_id to one that is in it",
        )

    def _with_store(self, store: Store, settings: StoreSettings, *, has_endpoint: bool) -> Iterator[Finding]:
        yield self._registration(store)
        trip = attempt("self-test", lambda: self._self_test(store), "a model's blocks must come back as stored")
        yield trip
        stored = trip.level is Level.WELL
        yield self._lease(store, settings) if stored else skipped("lease", "no object could be stored")
        yield attempt("hashes", lambda: self._hashes(store), "whether engines hit is not known")
        if has_endpoint:
            yield attempt("namespace", lambda: self._namespace(store, settings), "who shares is not known")
        else:
            yield skipped("namespace", "no endpoint")

    def _registration(self, store: Store) -> Finding:
        cache = NamedCache(self.model, 1)
        status = store.register(cache.address, cache.num_bytes)
        if not status.ok:
            return error(
                "registration",
                f"{in_bytes(cache.num_bytes)} were refused: {status.value}",
                "workers cannot register their staging area",
                "raise the limit on locked memory, and check that the protocol's device is there",
            )
        store.unregister(cache.address)
        return well("registration", f"{in_bytes(cache.num_bytes)} of host memory registered")

    def _self_test(self, store: Store) -> Finding:
        cache = NamedCache(self.model, self.num_blocks)
        trip = round_trip(store, cache, "packed")
        words = f"{trip.num_blocks} blocks of {self.model}, {in_bytes(trip.num_bytes)}"
        if trip.wrong_blocks:
            return error(
                "self-test",
                f"{words}: blocks {trip.wrong_blocks} came back with other bytes",
                "engines would answer from wrong KV",
                "do not serve with this store; check its version, transport and memory",
            )
        if trip.failures:
            full = Status.NO_SPACE.value in trip.failures[0]
            return error(
                "self-test",
                f"{words}: {trip.failures[0]} ({len(trip.failures)} in all)",
                "blocks are not stored" if full else "every load fails and is computed instead",
                "give the pool memory (global_segment_size), or wait for leases to end"
                if full
                else "look at the log of the master and of the segments' owners; is the protocol theirs?",
            )
        return well("self-test", f"{words}: byte for byte; {in_bytes(trip.num_bytes / trip.load_s[0])}/s loaded")

    def _lease(self, store: Store, settings: StoreSettings) -> Finding:
        """Longer than a transfer may take. The master does not say its lease, so an object is leased and removed."""
        needed_s = self._longest_transfer_s(settings)
        with own_keys(store, 1) as keys:
            if not store.write(keys[0], os.urandom(64)).ok or not store.exist(keys)[0].ok:
                return skipped("lease", "no object could be stored")
            start = time.monotonic()
            while (elapsed := time.monotonic() - start) < needed_s:
                if store.remove(keys)[0].ok:
                    return warning(
                        "lease",
                        f"a lease ends after about {elapsed:.1f} s, a transfer may take {needed_s:.1f} s",
                        "a read that outlives its lease may return other bytes; it is noticed, and computed instead",
                        f"start the master with --default_kv_lease_ttl {int(needed_s * 1000) + 1000}",
                    )
                time.sleep(min(0.1, needed_s / 20))
        return well("lease", f"longer than a transfer may take ({needed_s:.1f} s)")

    def _longest_transfer_s(self, settings: StoreSettings) -> float:
        if settings.protocol == "ascend":
            names = ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT")
            limits = [self.session.environ.get(name, "10000") for name in names]
            return max(float(limit) if limit.isdigit() else 10000.0 for limit in limits) / 1000
        return self.pool.max_bytes_per_call / SLOW_BYTES_PER_S

    def _hashes(self, store: Store) -> Finding:
        """How those who store in the namespace make block hashes, against this environment."""
        namespace, seed = self.pool.namespace, self.session.environ.get("PYTHONHASHSEED")
        found = read_hashing(store, namespace, newest_epoch(store.exist, namespace))
        if found is None:
            return well("hashes", f"nobody has said yet how block hashes are made in namespace {namespace!r}")
        if found.seed in (seed, SECRET):
            return well("hashes", f"{found}; engines must have --prefix-caching-hash-algo {found.algorithm[:40]}")
        return warning(
            "hashes",
            f"the block hashes of namespace {namespace!r} are made by {found}; here it is {seed!r}",
            "an engine with this environment finds none of the blocks that are stored, and nobody finds its",
            f"start every engine with {found.seed_in_words}"
            if found.seed is not None
            else "start every engine without PYTHONHASHSEED",
        )

    def _namespace(self, store: Store, settings: StoreSettings) -> Finding:
        namespace = self.pool.namespace
        endpoint = self.session.master_endpoint()
        inventory = take_inventory(endpoint.keys())
        tenant = settings.tenant_id
        words = f"namespace {namespace!r}" + ("" if tenant == DEFAULT_TENANT else f", tenant {tenant!r}")
        foreign = inventory.foreign_in(namespace)
        if foreign:
            return warning(
                "namespace",
                f"{words}: {len(foreign)} foreign objects, e.g. {foreign[0][:100]!r}",
                "somebody else writes under KVPool's prefix; nothing of theirs is ever read",
                "find out who; `kvpool ls` lists them",
            )
        shards = inventory.of(namespace)
        read_descriptors(store, endpoint, shards)
        found = deployments(shards)
        by_model = {d.shape.model.name for d in found}
        if len(found) > len(by_model):
            return warning(
                "namespace",
                f"{words}: {len(found)} kinds of deployment of {len(by_model)} models",
                "deployments that differ (dtype, layout, parallel shape, block size) share no KV",
                "`kvpool stat` tells them apart; this is right where they are meant to differ. GQA is shared between "
                "tensor parallel sizes with kv_head_split, layers between pipelines with prefill_pp_size",
            )
        return well("namespace", f"{words}: {len(found)} deployments, {sum(len(s.blocks) for s in shards)} objects")


def doctor(checkup: Checkup) -> Answer:
    """All findings, worst last to be read: exit status by the worst."""
    findings: list[Finding] = []
    for finding in checkup.findings():
        findings.append(finding)
        checkup.session.tell("looking", len(findings), NUM_CHECKS)
    levels = {finding.level for finding in findings}
    exit_ = Exit.ERROR if Level.ERROR in levels else Exit.LOOK if Level.WARNING in levels else Exit.WELL
    rows = Rows("doctor", ("check", "", "what was found"), [(f.check, f.level.value, f.what) for f in findings])
    lines = [
        f"{f.check}: {f.what}.\n  why it matters: {f.why}\n  what to do: {f.remedy}"
        for f in findings
        if f.level in (Level.WARNING, Level.ERROR)
    ]
    data = {"findings": [{**vars(f), "level": f.level.value} for f in findings], "self_test_namespace": NAMESPACE}
    return Answer(data, [rows], lines, exit_)
