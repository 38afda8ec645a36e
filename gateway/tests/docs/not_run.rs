//! Blocks that no test can run, with what they need.

const REGION: &str =
    "several machines; gateway/tests/it/region/commands.rs runs the commands on PostgreSQL";

/// Every block marked `sh norun`: its page, how it begins, and what it needs.
pub(crate) const NOT_RUN: [(&str, &str, &str); 58] = [
    ("README.md", "./test", "it would run itself"),
    (
        "docs/agent.md",
        "gw-agent http",
        "the page enrolls the machine by other commands; docs/quickstart.md runs it",
    ),
    (
        "docs/backup.md",
        "set -o pipefail",
        "age, and the key of a reader",
    ),
    (
        "docs/certificates.md",
        "tsig-keygen acme",
        "BIND and root; gateway/acme/tests/acme/updates.rs updates a zone of BIND",
    ),
    (
        "docs/configuration.md",
        "openssl s_client",
        "an appliance; shared/src/net/tls/trust/tests.rs trusts certificates like its own",
    ),
    (
        "docs/own-domains.md",
        "gw-gateway domain add",
        "DNS of a customer; gateway/tests/it/identity/own_domains.rs runs the commands with BIND",
    ),
    (
        "docs/own-domains.md",
        "gw-gateway certificate renew",
        "an own domain; gateway/tests/it/identity/own_domains/renewals.rs renews one",
    ),
    (
        "docs/own-domains.md",
        "gw-gateway certificate upload",
        "a certificate of a customer; gateway/tests/it/identity/own_domains.rs uploads one",
    ),
    (
        "docs/deployment.md",
        "sudo gw-gateway init",
        "systemd; gateway/tests/packages boots it",
    ),
    (
        "docs/deployment.md",
        "sudo certbot",
        "a certificate authority",
    ),
    ("docs/deployment.md", "ssh -L", "another machine"),
    (
        "docs/packages.md",
        "packaging/build deb",
        "release builds; gateway/tests/packages builds packages",
    ),
    (
        "docs/packages.md",
        "GW_RELEASE_KEY=",
        "a release; gateway/tests/packages/signed.sh runs these commands",
    ),
    (
        "docs/packages.md",
        "sudo install -m 644 gw-release.asc",
        "a release; gateway/tests/packages/signed.sh has apt use one",
    ),
    (
        "docs/packages.md",
        "packaging/build --verify",
        "two release builds; .github/workflows/weekly.yml runs it",
    ),
    (
        "docs/packages.md",
        "packaging/sign",
        "a release key; gateway/tests/packages/signed.sh runs it",
    ),
    (
        "docs/packages.md",
        "apt install ./gw-gateway_*.deb ./gw-agent_*.deb\ngw-gateway init",
        "packages; gateway/tests/packages installs them",
    ),
    (
        "docs/packages.md",
        "apt install ./gw-gateway_*.deb\ninstall",
        "a package; gateway/tests/packages installs it",
    ),
    (
        "docs/packages.md",
        "install --mode 644 gw-ca.crt",
        "files of a package",
    ),
    (
        "docs/packages.md",
        "apt install ./gw-agent",
        "a package; gateway/tests/packages installs it",
    ),
    (
        "docs/packages.md",
        "skopeo copy",
        "an image and a registry; gateway/tests/packages runs images",
    ),
    (
        "docs/packages.md",
        "podman run",
        "podman and images; gateway/tests/packages runs these commands by runc",
    ),
    ("docs/packages.md", "cd packaging", "Docker"),
    ("docs/packages.md", "kubectl apply", "Kubernetes"),
    ("docs/packages.md", "kubectl create namespace", "Kubernetes"),
    (
        "docs/packages.md",
        "gw-gateway enrollment-token create",
        "Kubernetes",
    ),
    (
        "docs/performance.md",
        "cargo build --release -p",
        "a release build and minutes",
    ),
    (
        "docs/performance.md",
        "cargo install rathole",
        "minutes, for an optional peer of a comparison",
    ),
    (
        "docs/recipes.md",
        "websocat",
        "a program that is not in Debian",
    ),
    (
        "docs/recipes.md",
        "grpcurl",
        "a program that is not in Debian",
    ),
    (
        "docs/region.md",
        "gw-gateway demo --nodes 3",
        "PostgreSQL, which may not be installed; another test runs it",
    ),
    ("docs/region.md", "sudo apt install postgresql", REGION),
    ("docs/region.md", "sudo pg_ctlcluster", REGION),
    ("docs/region.md", "sudo -u postgres psql -c", REGION),
    ("docs/region.md", "sudo gw-gateway region init", REGION),
    ("docs/region.md", "sudo apt install ./gw-gateway", REGION),
    ("docs/region.md", "sudo scp -p -r /etc/gw root@gw2", REGION),
    ("docs/region.md", "sudo scp -p -r /etc/gw root@gw3", REGION),
    (
        "docs/region-operation.md",
        "sudo --user gw-gateway gw-gateway region status",
        REGION,
    ),
    ("docs/region-operation.md", "echo \"disable health", REGION),
    (
        "docs/region-operation.md",
        "ssh root@gw3 systemctl start",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "sudo --user gw-gateway gw-gateway region drain",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "sudo --user gw-gateway gw-gateway region remove",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "sudo --user gw-gateway gw-gateway region repair",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "   openssl rand -hex 32 | sudo install",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "   sudo --user gw-gateway gw-gateway region rekey",
        REGION,
    ),
    ("docs/region-operation.md", "sudo systemctl kill", REGION),
    (
        "docs/region-operation.md",
        "   sudo --user gw-gateway gw-gateway region forget",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "sudo -u postgres pg_dump",
        REGION,
    ),
    (
        "docs/region-operation.md",
        "sudo -u postgres dropdb",
        REGION,
    ),
    ("docs/region.md", "sudo systemctl stop", REGION),
    ("docs/region.md", "sudo install", REGION),
    (
        "docs/security.md",
        "sudo gw-gateway agent-ca replace",
        "agents that renew; gateway/tests/it/identity/agent_ca.rs runs the commands",
    ),
    (
        "docs/simulation.md",
        "cargo simulate",
        "minutes; .ci/simulation runs seeds",
    ),
    (
        "docs/simulation.md",
        ".ci/simulation coverage",
        "minutes, and tools of LLVM",
    ),
    (
        "docs/simulation.md",
        "cargo test -p gw-simulation-mutants",
        "builds a program and runs many seeds; .github/workflows/weekly.yml runs it",
    ),
    (
        "docs/upgrade.md",
        "gw-gateway agent-program",
        "two programs; gateway/tests/it/identity/agent_updates.rs signs programs",
    ),
    (
        "docs/upgrade.md",
        "gw-gateway agent-program roll-back",
        "programs of two versions; gateway/tests/it/identity/agent_updates/roll_back.rs goes back \
         to one",
    ),
];
