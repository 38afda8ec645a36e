//! The address of the gateway, and the shell commands with which agents and callers reach it. Each
//! works as printed, on any machine: it has the port, and the CA certificate where the system does
//! not trust the gateway's.

use gw_shared::command::quoted;
use gw_shared::files;
use gw_shared::text::escaped;
use http::Uri;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Control;

/// How agents and callers reach the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayAddress {
    /// The gateway as it knows itself: the apex of the region, and the port that it listens on.
    pub gateway_url: String,
    /// PEM of the authority that agents and callers have to trust for the gateway; absent if the
    /// certificate is from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificate: Option<String>,
}

/// Port of the backend in commands, unless another one is given.
pub const BACKEND_PORT: u16 = 3000;

impl GatewayAddress {
    /// Adds the port that the gateway listens on to the URL.
    pub(crate) fn on_port(mut self, port: u16) -> Self {
        if port != 443 {
            self.gateway_url.push_str(&format!(":{port}"));
        }
        self
    }

    /// The command that the others begin with: it writes the CA certificate to a file. Empty for a
    /// public authority.
    pub fn write_authority(&self) -> String {
        self.ca_file("").0
    }

    /// The command that enrolls an agent and runs it in front of a program on `backend_port` of the
    /// same machine.
    ///
    /// The token is on standard input: other users of that machine can read the arguments of the
    /// running agent.
    pub fn agent_command(&self, token: &str, backend_port: u16) -> String {
        let (before, ca_option) = self.ca_file("--ca-file");
        let gateway = quoted(&self.gateway_url);
        let token = escaped(token);
        format!(
            "{before}gw-agent http {backend_port} --gateway {gateway}{ca_option} --token-file - \
             <<'END'\n{token}\nEND"
        )
    }

    /// The command that calls a service with a service key.
    pub fn call_with_key(&self, hostname: &str, key: &str) -> String {
        let (before, ca_option) = self.ca_file("--cacert");
        let url = quoted(&format!("https://{hostname}{}/", self.port()));
        format!(
            "{before}curl -sS{ca_option} {url} \\\n  -H {}",
            quoted(&format!("X-Gw-Service-Key: {key}"))
        )
    }

    /// The commands that get an access token, and call a service with it.
    pub(crate) fn call_with_token(
        &self,
        hostname: &str,
        account: &str,
        service: &str,
        client_id: &str,
        secret: &str,
    ) -> String {
        let (before, ca_option) = self.ca_file("--cacert");
        let client = quoted(&format!("{client_id}:{secret}"));
        let curl = format!("curl -sS{ca_option}");
        let scope = quoted(&format!("scope=account:{account} service:{service}"));
        let token_url = quoted(&format!("{}/oauth/token", self.gateway_url));
        let url = quoted(&format!("https://{hostname}{}/", self.port()));
        format!(
            "{before}TOKEN=$({curl} {token_url} \\\n  -u {client} -d {scope} \\\n  \
             | sed 's/.*\"access_token\":\"\\([^\"]*\\)\".*/\\1/')\n\
             {curl} {url} \\\n  -H \"X-Gw-Authorization: Bearer $TOKEN\""
        )
    }

    /// With a leading colon; empty for the default port of https.
    fn port(&self) -> String {
        let port = self
            .gateway_url
            .parse::<Uri>()
            .ok()
            .and_then(|url| url.port_u16());
        port.map_or_else(String::new, |port| format!(":{port}"))
    }

    /// A command that writes the CA certificate to a file, and the option that names the file; both
    /// are empty for a public authority, and for text that is not PEM, which could end the command
    /// and begin another.
    fn ca_file(&self, option: &str) -> (String, String) {
        let is_pem = |line: &str| {
            line != "END"
                && line
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"+/=- ".contains(&byte))
        };
        let pem = self
            .ca_certificate
            .as_ref()
            .filter(|pem| pem.trim().split('\n').all(is_pem));
        pem.map_or_else(Default::default, |pem| {
            (
                format!("cat > gw-ca.crt <<'END'\n{}\nEND\n", pem.trim()),
                format!(" {option} gw-ca.crt"),
            )
        })
    }
}

impl Control {
    /// The address of the gateway, without its port.
    pub(crate) fn gateway_address(&self) -> GatewayAddress {
        let ca_certificate = self.development_ca().and_then(|file| {
            let read = files::read_text(&file);
            read.inspect_err(
                |error| tracing::warn!(%error, "cannot read the CA certificate for commands"),
            )
            .ok()
        });
        GatewayAddress {
            gateway_url: self.region.base_url(),
            ca_certificate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn public() -> GatewayAddress {
        GatewayAddress {
            gateway_url: "https://eu1.example.com".to_owned(),
            ca_certificate: None,
        }
    }

    #[test]
    fn no_part_of_a_command_ends_it() {
        let url = "https://eu1.example.com/'$(reboot)\n\x1b";
        for ca in ["PEM\nEND\nreboot", "PEM\r\nreboot", "$(reboot)", "\x1b[2J"] {
            let address = GatewayAddress {
                gateway_url: url.to_owned(),
                ca_certificate: Some(ca.to_owned()),
            };
            let command = address.agent_command("gw_et_a.b\nEND\nreboot", 3000);
            let expected = concat!(
                r"gw-agent http 3000 --gateway 'https://eu1.example.com/'\''$(reboot)\u{a}\u{1b}' ",
                "--token-file - <<'END'\n",
                r"gw_et_a.b\u{a}END\u{a}reboot",
                "\nEND",
            );
            assert_eq!(command, expected, "{ca:?}");
        }
    }

    #[test]
    fn commands_omit_the_default_port_and_public_authorities() {
        let public = public().on_port(443);
        assert_eq!(
            public.call_with_key("acme--api.eu1.example.com", "gw_sk_a.b"),
            "curl -sS https://acme--api.eu1.example.com/ \\\n  -H 'X-Gw-Service-Key: gw_sk_a.b'"
        );
        assert_eq!(
            public.agent_command("gw_et_a.b", 3000),
            "gw-agent http 3000 --gateway https://eu1.example.com --token-file - <<'END'\n\
             gw_et_a.b\nEND"
        );
        let public_file = public.write_authority();
        let own = GatewayAddress {
            ca_certificate: Some("PEM\n".to_owned()),
            ..public
        }
        .on_port(8443);
        let file = "cat > gw-ca.crt <<'END'\nPEM\nEND\n";
        assert_eq!(
            (own.write_authority(), public_file),
            (file.to_owned(), String::new())
        );
        assert_eq!(
            own.call_with_key("acme--api.eu1.example.com", "gw_sk_a.b"),
            format!(
                "{file}curl -sS --cacert gw-ca.crt https://acme--api.eu1.example.com:8443/ \\\n  \
                 -H 'X-Gw-Service-Key: gw_sk_a.b'"
            )
        );
        assert_eq!(
            own.agent_command("gw_et_a.b", 80),
            format!(
                "{file}gw-agent http 80 --gateway https://eu1.example.com:8443 --ca-file gw-ca.crt \
                 --token-file - <<'END'\ngw_et_a.b\nEND"
            )
        );
    }
}
