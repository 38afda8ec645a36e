//! Shell commands that pages suggest.

use gw_shared::command::quoted;

use crate::admin::Admin;

/// The address of the gateway for callers, as far as the gateway knows it.
pub(crate) struct GatewayAddress {
    apex: String,
    /// With a leading colon; empty for the default port of https.
    port: String,
    /// File of the CA certificate, unless it is a public authority.
    ca_file: Option<String>,
}

impl GatewayAddress {
    pub(crate) fn of(admin: &Admin) -> Self {
        let control = &admin.control;
        let port = admin.console.port;
        Self {
            apex: control.region().apex().to_owned(),
            port: if port == 443 { String::new() } else { format!(":{port}") },
            ca_file: control.development_ca().map(|file| file.display().to_string()),
        }
    }

    pub(crate) fn call_with_key(&self, account: &str, service: &str, key: &str) -> String {
        let Self { apex, port, .. } = self;
        let curl = self.curl();
        format!(
            "{curl} https://{account}--{service}.{apex}{port}/ \\\n  -H {}",
            quoted(&format!("X-Gw-Service-Key: {key}"))
        )
    }

    pub(crate) fn call_with_token(&self, account: &str, service: &str, client_id: &str, secret: &str) -> String {
        let Self { apex, port, .. } = self;
        let curl = self.curl();
        let scope = quoted(&format!("scope=account:{account} service:{service}"));
        format!(
            "TOKEN=$({curl} https://{apex}{port}/oauth/token \\\n  -u {client_id}:{secret} -d {scope} \\\n  \
             | sed 's/.*\"access_token\":\"\\([^\"]*\\)\".*/\\1/')\n\
             {curl} https://{account}--{service}.{apex}{port}/ \\\n  -H \"X-Gw-Authorization: Bearer $TOKEN\""
        )
    }

    pub(crate) fn run() -> &'static str {
        "gw-agent run --backend http://127.0.0.1:8080"
    }

    fn curl(&self) -> String {
        let ca_file = self.ca_file.as_ref().map_or_else(String::new, |file| format!(" --cacert {}", quoted(file)));
        format!("curl -sS{ca_file}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_omit_the_default_port_and_public_authorities() {
        let public = GatewayAddress { apex: "eu1.example.com".into(), port: String::new(), ca_file: None };
        assert_eq!(
            public.call_with_key("acme", "api", "gw_sk_a.b"),
            "curl -sS https://acme--api.eu1.example.com/ \\\n  -H 'X-Gw-Service-Key: gw_sk_a.b'"
        );
        let own = GatewayAddress { port: ":8443".into(), ca_file: Some("/tmp/it's here/ca.crt".into()), ..public };
        assert!(own.call_with_token("acme", "api", "gw_ci_x", "gw_cs_y").starts_with(
            r"TOKEN=$(curl -sS --cacert '/tmp/it'\''s here/ca.crt' https://eu1.example.com:8443/oauth/token"
        ));
    }
}
