//! `gw-gateway doctor`: checks whether this configuration works on this machine, and whether
//! callers and agents can reach it. Does not disturb a running gateway. Changes nothing, but for an
//! object in the archive that it deletes again.

mod access_log;
mod archive;
mod certificate;
mod issued;
mod request_log;
pub(super) mod store;
mod unit;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use crate::limits;
use gw_base::tls::certificate::{PairKeys, TENANT};
use gw_base::tls::{CertificateFiles, CertificateSource, node};
use gw_data_plane::ingress::PLAIN_HTTP;
use gw_data_plane::memory::sockets::TcpMemory;
use gw_interface::config::{Challenge, Config, ProxyProtocol, StoreSettings, TrustedProxies};
use gw_shared::doctor::{Examination, machine};
use gw_shared::error_code::ErrorCode;
use gw_shared::net::tls::SPEAK_TLS;
use gw_store::{Sealing, StoreError};
use gw_telemetry::request_log::AccessLogTarget;
use rustix::fs::Access;

use super::config_file::ConfigFile;
use super::sockets::listen_advice::advice;

/// Open files that a busy gateway needs.
const OPEN_FILES: u64 = 65_536;
/// Bytes of the answer to a plain HTTP request that are read.
const ANSWER_MAX: u64 = 4096;
/// Longest wait for name resolution, and for the answer of a running gateway.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Checks the machine and, if `file` is given, its configuration.
pub fn examine(file: Option<&Path>, environment: impl Fn(&str) -> Option<String>) -> Examination {
    let mut out = Examination::default();
    machine::examine(&mut out, OPEN_FILES);
    kernel_settings(&mut out);
    let Some(file) = file else {
        out.warning(
            "configuration",
            "none given",
            "add --config gateway.toml to check it too",
        );
        return out;
    };
    const ADVICE: &str =
        "docs/configuration.md lists the keys; `gw-gateway serve --check` reports the same";
    let parsed = |read: ConfigFile| {
        let parsed = Config::parse(read.text(), environment);
        parsed.map_err(|errors| format!("{}: {errors}", file.display()))
    };
    match ConfigFile::read(file).and_then(parsed) {
        Err(error) => out.failed("configuration", error, ADVICE),
        Ok(config) => configured(&mut out, file, &config),
    }
    out
}

/// Reports whether the room on the disk for changes that take access away is there.
fn reserve(out: &mut Examination, config: &Config) {
    const CHECK: &str = "reserve";
    let reserve = gw_control_plane::control::reserve(config);
    let path = reserve.path().display();
    match reserve.missing() {
        Ok(0) => out.ok(CHECK, path.to_string()),
        Ok(_) if !config.data_dir.join("admin.token").exists() => {
            out.ok(CHECK, "made by the first start");
        }
        Ok(missing) => out.warning(
            CHECK,
            format!("{path}: {} KiB are missing", missing.div_ceil(1024)),
            "free space: a running gateway makes the reserve whole within a minute; without it, a \
             full disk prevents revocations",
        ),
        // Without a folder, as reported before.
        Err(_) => {}
    }
}

/// Reports how private keys and the admin token are stored, and whether they can be opened.
fn secrets_at_rest(out: &mut Examination, config: &Config) {
    const CHECK: &str = "secrets at rest";
    const ADVICE: &str =
        "docs/deployment.md says how systemd hands the key over; `doctor` has to run with it, too";
    if let StoreSettings::Postgres(_) = config.store {
        let found = "sealed in the database with region_key; the files in data_dir are not sealed";
        return out.ok(CHECK, found);
    }
    let token = config.data_dir.join("admin.token");
    let sealing = Sealing::load(config.seal_key.as_deref());
    let opened = sealing.and_then(|sealing| {
        if token.exists() {
            sealing.read_file(&token).map(drop)
        } else {
            Ok(())
        }
    });
    match (opened, &config.seal_key) {
        (Err(error @ (StoreError::Sealed(_) | StoreError::SealKey(_))), _) => {
            out.failed(CHECK, error.to_string(), ADVICE);
        }
        (_, Some(path)) => out.ok(CHECK, format!("sealed with {}", path.display())),
        (_, None) => out.ok(
            CHECK,
            "as they are, in files of mode 0600 (seal_key seals them)",
        ),
    }
}

fn kernel_settings(out: &mut Examination) {
    let bursts = "the kernel drops larger bursts of new connections";
    machine::setting(
        out,
        "net/core/somaxconn",
        limits::BACKLOG.unsigned_abs().into(),
        bursts,
    );
    machine::setting(
        out,
        "net/ipv4/tcp_max_syn_backlog",
        1024,
        "more half-open connections have to wait",
    );
    let long = "throughput is low on paths with a long round trip";
    machine::setting(out, "net/ipv4/tcp_rmem", 4 * 1024 * 1024, long);
    machine::setting(out, "net/ipv4/tcp_wmem", 4 * 1024 * 1024, long);
    machine::setting(out, "net/ipv4/tcp_window_scaling", 1, long);
    tcp_memory(out);
}

/// Checks the memory of all TCP connections of the machine against its limit.
fn tcp_memory(out: &mut Examination) {
    const CHECK: &str = "net.ipv4.tcp_mem";
    let (Some(memory), Some(used)) = (TcpMemory::of_machine(), TcpMemory::used()) else {
        return out.ok(CHECK, "cannot be read here");
    };
    let mib = |bytes: usize| bytes >> 20;
    let about = format!(
        "throttles at {} MiB, refuses at {} MiB; {} MiB in use",
        mib(memory.pressure),
        mib(memory.limit),
        mib(used)
    );
    if used >= memory.mark() {
        out.warning(
            CHECK,
            about,
            "close to the limit: all connections slow down, and callers that hold the most are \
             reset; raise the limit",
        );
    } else {
        out.ok(CHECK, about);
    }
}

fn configured(out: &mut Examination, file: &Path, config: &Config) {
    out.ok("configuration", file.display().to_string());
    machine::folder(out, "data_dir", &config.data_dir);
    machine::core_dumps(out, config.core_dumps);
    reserve(out, config);
    secrets_at_rest(out, config);
    if let StoreSettings::Postgres(settings) = &config.store {
        store::examine(out, config, settings);
    }
    request_log::examine(out, config);
    if let Some(AccessLogTarget::File(path)) = &config.access_log {
        access_log::examine(out, path);
    }
    if let Some(settings) = &config.archive {
        archive::examine(out, config, settings);
    }
    listeners(out, config);
    match &config.certificate {
        CertificateSource::Files { certificate, key } => {
            certificate::pair_of_files(
                out,
                "certificate",
                PairKeys::CALLERS,
                certificate,
                key,
                Some(&config.region),
            );
        }
        CertificateSource::Acme { .. } => acme(out, config),
        CertificateSource::Development { .. } => out.warning(
            "certificate",
            "issued by the development authority that the gateway creates at start",
            "set tls_certificate and tls_key: callers and agents trust this one only if configured \
             to",
        ),
    }
    admin_listener(out, config);
    proxies(out, config);
    for (check, name) in [
        ("name of the apex", config.region.apex().to_owned()),
        (
            "names of tenants",
            format!("{TENANT}.{}", config.region.apex()),
        ),
    ] {
        dns(out, check, &name, config.listen.port());
    }
}

/// Checks the address of each listener.
fn listeners(out: &mut Examination, config: &Config) {
    let no_proxies = TrustedProxies::default();
    // Without the admin listener, the listener for callers may belong to another configuration.
    let runs = match &config.admin_certificate {
        None => is_admin_listener(config.admin_listen),
        Some(_) => is_listener(config.admin_listen, &no_proxies).unwrap_or(false),
    };
    let belongs = |address, proxies| runs && is_listener(address, proxies).unwrap_or(false);
    let listens = belongs(config.listen, &config.trusted_proxies);
    let ports = [
        ("listen", config.listen, listens),
        ("admin_listen", config.admin_listen, runs),
    ]
    .into_iter();
    let peers = config
        .peer_listen
        .map(|address| ("peer_listen", address, runs && is_node_listener(address)));
    let plain = config.listen_http.map(|address| {
        (
            "listen_http",
            address,
            belongs(address, &config.trusted_proxies),
        )
    });
    for (check, address, runs) in ports.chain(plain).chain(peers) {
        let found = match TcpListener::bind(address) {
            Ok(_) => Port::Free,
            Err(_) if runs => Port::Serves,
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied
                    && unit::may_bind_low_ports() =>
            {
                Port::of_unit(address)
            }
            Err(error) => Port::Refused(error),
        };
        port(out, check, address, &found);
    }
}

/// Checks what the order of a certificate needs.
fn acme(out: &mut Examination, config: &Config) {
    const CHECK: &str = "certificate";
    let Some(acme) = &config.acme else {
        return;
    };
    let (key, file, mode) = match &acme.challenge {
        Some(Challenge::Rfc2136(settings)) => {
            ("acme.rfc2136.key_file", &settings.key_file, Access::READ_OK)
        }
        Some(Challenge::Hook(settings)) => {
            ("acme.hook.program", &settings.program, Access::EXEC_OK)
        }
        Some(Challenge::TlsAlpn) | None => return issued::examine(out, config, acme),
    };
    match rustix::fs::access(file, mode) {
        Ok(()) => issued::examine(out, config, acme),
        Err(error) => out.failed(
            CHECK,
            format!("{key}: {}: {error}", file.display()),
            "check its path, and that the user of the gateway may use it",
        ),
    }
}

/// Checks what protects the admin listener.
fn admin_listener(out: &mut Examination, config: &Config) {
    const CHECK: &str = "admin certificate";
    if let Some(CertificateFiles { certificate, key }) = &config.admin_certificate {
        certificate::pair_of_files(out, CHECK, PairKeys::ADMIN, certificate, key, None);
    } else if config.open_admin_listener(config.admin_listen).is_some() {
        let found = format!("none, and other machines can reach {}", config.admin_listen);
        out.warning(
            CHECK,
            found,
            "set admin_tls_certificate and admin_tls_key, or listen on loopback",
        );
    }
}

/// Checks that the configuration says which trusted proxies announce their clients.
fn proxies(out: &mut Examination, config: &Config) {
    const CHECK: &str = "trusted_proxies";
    if let Some((found, remedy)) = config.guessed_proxies() {
        out.failed(CHECK, found, remedy);
    } else if !config.trusted_proxies.is_empty() {
        out.ok(CHECK, "each has a proxy_protocol");
    }
}

/// Whether a gateway answers a plain HTTP request at `address`, on a listener with TLS or on that
/// for redirects. Sends the header that a gateway behind `proxies` requires of this machine.
fn is_listener(address: SocketAddr, proxies: &TrustedProxies) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, TIME_LIMIT)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    if proxies.proxy_protocol(stream.local_addr()?.ip()) == Some(ProxyProtocol::Required) {
        stream.write_all(b"PROXY UNKNOWN\r\n")?;
    }
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    let contains = |text: &str| memchr::memmem::find(&answer, text.as_bytes()).is_some();
    // The host of this request is none of the region.
    let is_misdirected = || contains(ErrorCode::Misdirected.as_str());
    Ok(answer == SPEAK_TLS || contains(PLAIN_HTTP) || is_misdirected())
}

/// Whether a gateway listens for other nodes at `address`.
fn is_node_listener(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&address, TIME_LIMIT).is_ok_and(|stream| {
        stream.set_read_timeout(Some(TIME_LIMIT)).is_ok()
            && node::accepts_links(stream).unwrap_or(false)
    })
}

/// Whether a gateway answers at `admin`.
fn is_admin_listener(admin: SocketAddr) -> bool {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(TIME_LIMIT))
        .proxy(None);
    let agent: ureq::Agent = config.build().into();
    let answer = agent.get(format!("http://{admin}/healthz")).call();
    answer.is_ok_and(|mut answer| {
        answer
            .body_mut()
            .read_to_string()
            .is_ok_and(|body| body == "ok\n")
    })
}

/// State of the address of a listener.
enum Port {
    Free,
    /// This gateway has it.
    Serves,
    /// This user may not bind it, but the service of systemd may; no program listens there.
    FreeForUnit,
    /// Another program listens there, as far as this user can tell.
    Taken,
    Refused(io::Error),
}

impl Port {
    /// A port that only the service of systemd may bind.
    fn of_unit(address: SocketAddr) -> Self {
        match TcpStream::connect_timeout(&address, TIME_LIMIT) {
            Ok(_) => Self::Taken,
            Err(_) => Self::FreeForUnit,
        }
    }
}

/// Reports the state of `address`.
fn port(out: &mut Examination, check: &str, address: SocketAddr, found: &Port) {
    let taken = || format!("{address}: another program listens there");
    match found {
        Port::Free => out.ok(check, format!("{address} is free")),
        Port::Serves => out.ok(check, format!("{address}: a gateway has it and answers")),
        Port::FreeForUnit => out.ok(
            check,
            format!(
                "{address} is free, and the unit of the gateway may bind it; this user may not"
            ),
        ),
        Port::Taken => out.failed(
            check,
            taken(),
            advice(address, &io::ErrorKind::AddrInUse.into()),
        ),
        Port::Refused(error) if error.kind() == io::ErrorKind::AddrInUse => {
            out.failed(check, taken(), advice(address, error));
        }
        Port::Refused(error) if error.kind() == io::ErrorKind::PermissionDenied => out.failed(
            check,
            format!("{address}: this user may not bind the port"),
            advice(address, error),
        ),
        Port::Refused(error) => {
            out.failed(check, format!("{address}: {error}"), advice(address, error));
        }
    }
}

fn dns(out: &mut Examination, check: &str, name: &str, port: u16) {
    if name.ends_with(".localhost") {
        // RFC 6761 §6.3.
        return out.ok(check, format!("{name}: always this machine"));
    }
    let advice = "point both the apex and a wildcard below it at this gateway";
    match resolve(name, port) {
        Ok(addresses) => {
            let addresses: Vec<String> = addresses
                .iter()
                .map(|address| address.ip().to_string())
                .collect();
            out.ok(
                check,
                format!("{name} resolves to {}", addresses.join(", ")),
            );
        }
        Err(error) => out.failed(check, format!("{name}: {error}"), advice),
    }
}

/// The addresses of a name, at least one.
pub fn resolve(name: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    // The system resolver has no time limit.
    let (result, results) = std::sync::mpsc::channel();
    let asked = name.to_owned();
    std::thread::spawn(move || {
        result.send(
            (asked.as_str(), port)
                .to_socket_addrs()
                .map(Iterator::collect::<Vec<_>>),
        )
    });
    match results.recv_timeout(TIME_LIMIT) {
        Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Ok(Ok(_)) => Err("it has no address".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {TIME_LIMIT:?}")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gw_shared::doctor::Verdict;

    use super::*;

    pub(super) fn verdicts(examine: impl FnOnce(&mut Examination)) -> BTreeMap<String, Verdict> {
        let mut out = Examination::default();
        examine(&mut out);
        out.checks()
            .iter()
            .map(|finding| (finding.check.clone(), finding.verdict))
            .collect()
    }

    #[test]
    fn a_port_is_free_or_used_by_a_gateway_or_blocked() {
        let address: SocketAddr = "127.0.0.1:443".parse().unwrap();
        let refused = |kind: io::ErrorKind| Port::Refused(kind.into());
        for (at, verdict) in [
            (Port::Free, Verdict::Ok),
            (Port::Serves, Verdict::Ok),
            (Port::FreeForUnit, Verdict::Ok),
            (Port::Taken, Verdict::Failed),
            (refused(io::ErrorKind::AddrInUse), Verdict::Failed),
            (refused(io::ErrorKind::PermissionDenied), Verdict::Failed),
            (refused(io::ErrorKind::AddrNotAvailable), Verdict::Failed),
        ] {
            let found = verdicts(|out| port(out, "listen", address, &at));
            assert_eq!(found["listen"], verdict);
        }
        // A port that this user may not bind is judged by what listens there.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(matches!(Port::of_unit(address), Port::Taken));
        let held =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        held.bind(&any.into()).unwrap();
        let silent = held.local_addr().unwrap().as_socket().unwrap();
        assert!(matches!(Port::of_unit(silent), Port::FreeForUnit));
    }

    #[test]
    fn all_parts_of_a_configuration_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        let data_dir = folder.path().join("data");
        let minimal = format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\n",
            data_dir.display()
        );
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let ports = format!(
            "listen = \"{}\"\nadmin_listen = \"127.0.0.1:0\"\n",
            taken.local_addr().unwrap()
        );
        std::fs::write(&file, format!("{minimal}{ports}")).unwrap();
        let examine = || examine(Some(&file), |_| None);
        let found = verdicts(|out| *out = examine());
        for (check, verdict) in [
            ("configuration", Verdict::Ok),
            ("data_dir", Verdict::Ok),
            ("listen", Verdict::Failed),
            ("admin_listen", Verdict::Ok),
            ("certificate", Verdict::Warning),
            ("names of tenants", Verdict::Ok),
        ] {
            assert_eq!(found.get(check), Some(&verdict), "{check}: {found:?}");
        }
        for (path, verdict) in [
            (folder.path().join("access.jsonl"), Verdict::Ok),
            ("/nowhere/a".into(), Verdict::Failed),
        ] {
            std::fs::write(
                &file,
                format!("{minimal}{ports}access_log = \"{}\"\n", path.display()),
            )
            .unwrap();
            assert_eq!(verdicts(|out| *out = examine())["access_log"], verdict);
        }
        for (proxies, verdict) in [
            (
                "[\"10.0.0.0/8\", \"192.0.2.1=off\"]",
                Some(&Verdict::Failed),
            ),
            ("[\"192.0.2.1=off\"]", Some(&Verdict::Ok)),
            ("[]", None),
        ] {
            std::fs::write(
                &file,
                format!("{minimal}{ports}trusted_proxies = {proxies}\n"),
            )
            .unwrap();
            assert_eq!(
                verdicts(|out| *out = examine()).get("trusted_proxies"),
                verdict,
                "{proxies}"
            );
        }
        std::fs::write(&file, "region = 7\ncolour = 1\n").unwrap();
        let out = examine();
        let last = out.checks().last().unwrap();
        assert!(
            last.verdict == Verdict::Failed
                && last.found.contains("region")
                && last.found.contains("colour")
        );
    }

    #[test]
    fn a_log_that_lost_days_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("requests");
        std::fs::create_dir(&log).unwrap();
        let region = gw_base::service::hostname::Region::new("eu1", "gw.localhost");
        let config = Config::new(region, folder.path().to_owned());
        let verdict = || verdicts(|out| request_log::examine(out, &config))["request log"];
        assert_eq!(verdict(), Verdict::Ok);
        std::fs::write(log.join("2026-11-20.removed"), "").unwrap();
        assert_eq!(verdict(), Verdict::Warning);
    }
}
