//! Explanation of a connection to PostgreSQL that cannot be made: by the text of PostgreSQL, of the
//! TLS client or of the system, because the errors of all three have no common code.

/// What to do about a server that cannot be reached.
pub const UNREACHABLE: &str =
    "start PostgreSQL, and let this machine reach it: hosts in `store`, listen_addresses, firewall";

/// Words of a reason, whether the server refuses the connection then, and what to do.
const REMEDIES: [(&str, bool, &str); 10] = [
    (
        "performing TLS handshake",
        true,
        "set store_ca to a PEM file of the authority's certificate, or of the server's certificate \
         itself; name the host as the certificate does; let the server take TLS 1.3 or 1.2 without \
         a client certificate",
    ),
    (
        "password missing",
        true,
        "set the password of the user in `store`: store_password_file names a file that holds it",
    ),
    (
        "password",
        true,
        "correct the password of the user in `store`: in the file of store_password_file, or with \
         ALTER ROLE in PostgreSQL",
    ),
    (
        "pg_hba.conf",
        true,
        "add a line for this machine and user to pg_hba.conf (type hostssl), and reload PostgreSQL",
    ),
    (
        "does not support TLS",
        true,
        "set ssl = on in postgresql.conf, or add ?sslmode=disable to `store` on a private network",
    ),
    (
        "the database system is",
        false,
        "wait until PostgreSQL has started; its log says what it waits for",
    ),
    ("role", true, "create the user: createuser --pwprompt gw"),
    (
        "database",
        true,
        "create the database: createdb --owner gw gw, or correct its name in `store`",
    ),
    (
        "lookup",
        false,
        "correct the host in `store`, or its name in DNS",
    ),
    ("connect", false, UNREACHABLE),
];

/// What to do about a failed attempt to connect; `None` if the reason is of another kind.
pub fn remedy(reason: &str) -> Option<&'static str> {
    entry(reason).map(|(.., remedy)| *remedy)
}

/// The reason of [`StoreError::Unavailable`](super::StoreError::Unavailable), with what to do.
pub(super) fn explained(reason: &str) -> String {
    // PostgreSQL gives details in further lines.
    let reason = reason.replace('\n', "; ");
    match entry(&reason) {
        Some((_, true, remedy)) => format!("PostgreSQL refuses the connection: {reason}; {remedy}"),
        Some((_, false, remedy)) => format!("PostgreSQL does not answer: {reason}; {remedy}"),
        None => format!("PostgreSQL does not answer: {reason}"),
    }
}

fn entry(reason: &str) -> Option<&'static (&'static str, bool, &'static str)> {
    REMEDIES.iter().find(|(words, ..)| reason.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_has_a_remedy_of_its_own() {
        for (reason, words) in [
            (
                "db1: FATAL: password authentication failed for user \"gw\"",
                "store_password_file",
            ),
            (
                "db1: invalid configuration: password missing",
                "store_password_file",
            ),
            (
                "db1: FATAL: no pg_hba.conf entry for host \"10.0.0.7\", user \"gw\", database \
                 \"gw\"",
                "hostssl",
            ),
            (
                "db1: error performing TLS handshake: its certificate, for db1, is self-signed and \
                 is not trusted",
                "store_ca",
            ),
            ("db1: FATAL: role \"gw\" does not exist", "createuser"),
            ("db1: FATAL: database \"gw\" does not exist", "createdb"),
            (
                "db1: error connecting to server: Connection refused (os error 111)",
                "start PostgreSQL",
            ),
        ] {
            assert!(
                remedy(reason).unwrap_or_default().contains(words),
                "{reason}: {}",
                remedy(reason).unwrap_or_default()
            );
        }
    }

    #[test]
    fn a_refusal_is_told_from_a_server_that_is_down() {
        let refused = "db1: db error: FATAL: database \"gw\" does not exist";
        let text = explained(refused);
        assert!(
            text.starts_with("PostgreSQL refuses the connection: db1: ")
                && text.contains("createdb"),
            "{text}"
        );
        let down = "db1: error connecting to server: Connection refused (os error 111)";
        let text = explained(down);
        assert!(
            text.starts_with("PostgreSQL does not answer: db1: ") && text.ends_with(UNREACHABLE),
            "{text}"
        );
        assert_eq!(
            explained("the synchronous standby does not confirm the change"),
            "PostgreSQL does not answer: the synchronous standby does not confirm the change"
        );
    }
}
