//! BIND with zones that a key may update: `example.test`, `delegated.test`, `gw.localhost`, whose
//! names have an address, and `customer.test`.

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::{Server, free_address};

/// Name of the key that may update.
pub(crate) const KEY_NAME: &str = "acme";
const KEY: &str = "key \"acme\" {\n\talgorithm hmac-sha256;\n\
                   \tsecret \"0mmrP8M0nR8Yz9GcAmvSeA5FvWxhTBBzDjCHrZi0n4o=\";\n};\n";

/// A running BIND.
pub(crate) struct Named {
    _server: Server,
    folder: TempDir,
    /// Its address, for TCP and UDP.
    pub(crate) address: SocketAddr,
}

impl Named {
    /// Starts BIND with these additional records of `example.test`.
    pub(crate) fn start(records: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = free_address();
        let path = folder.path().display();
        let zone = |name: &str, records: &str| {
            let text = format!(
                "$TTL 60\n@ SOA ns hostmaster 1 60 60 600 60\n@ NS ns\nns A 127.0.0.1\n{records}\n"
            );
            fs::write(folder.path().join(name), text).unwrap();
            format!(
                "zone \"{name}\" {{ type primary; file \"{name}\"; update-policy {{ grant \
                 {KEY_NAME} zonesub TXT CNAME; }}; }};\n"
            )
        };
        let zones = [
            zone("example.test", records),
            zone("delegated.test", ""),
            zone("gw.localhost", "eu1 A 127.0.0.1\n*.eu1 A 127.0.0.1"),
            zone("customer.test", ""),
        ]
        .concat();
        let configuration = format!(
            "options {{\n directory \"{path}\"; pid-file none; session-keyfile none;\n listen-on \
             port {} {{ 127.0.0.1; }}; listen-on-v6 {{ none; }};\n recursion yes; allow-recursion \
             {{ any; }}; forward only; forwarders {{ 127.0.0.1 port 9; }};\n dnssec-validation no; \
             empty-zones-enable no;\n}};\ncontrols {{ }};\n{KEY}{zones}",
            address.port()
        );
        let file = folder.path().join("named.conf");
        fs::write(&file, configuration).unwrap();
        fs::write(folder.path().join("acme.key"), KEY).unwrap();
        let log = fs::File::create(folder.path().join("named.log")).unwrap();
        let child = Command::new("/usr/sbin/named")
            .args(["-g", "-n", "1", "-c"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self {
            _server: Server::accepting(child, &[address]).expect("named runs"),
            folder,
            address,
        }
    }

    /// File with the key.
    pub(crate) fn key_file(&self) -> PathBuf {
        self.folder.path().join("acme.key")
    }

    /// Changes records by commands of `nsupdate`, such as `add api.customer.test 1 CNAME
    /// example.test`.
    pub(crate) fn update(&self, commands: &[&str]) {
        let server = format!("server 127.0.0.1 {}\n", self.address.port());
        let text = format!("{server}{}\nsend\n", commands.join("\n"));
        let mut child = Command::new("nsupdate")
            .arg("-k")
            .arg(self.key_file())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(text.as_bytes()).unwrap();
        drop(input);
        assert!(child.wait().unwrap().success(), "{text}");
    }

    /// The TXT records of a name, as `dig` prints them.
    pub(crate) fn texts(&self, name: &str) -> Vec<String> {
        let output = Command::new("dig")
            .args([
                "+short",
                "@127.0.0.1",
                "-p",
                &self.address.port().to_string(),
            ])
            .args([name, "TXT"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}
