//! URLs of databases.

/// The URL without the password of its user, and without its parameters, which can hold one.
/// Nothing of a text that is not a URL.
pub fn without_password(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("://") else {
        return String::new();
    };
    match rest.rsplit_once('@') {
        Some((user, rest)) => format!(
            "{scheme}://{}@{rest}",
            user.split(':').next().unwrap_or_default()
        ),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_left_out_of_urls() {
        for (url, expected) in [
            (
                "postgres://gw:secret@db1:5433,db2/gw",
                "postgres://gw@db1:5433,db2/gw",
            ),
            (
                "postgres://gw:a@b@db1/gw?password=secret",
                "postgres://gw@db1/gw",
            ),
            ("postgresql://db1/gw", "postgresql://db1/gw"),
            ("host=db1 password=secret", ""),
        ] {
            assert_eq!(without_password(url), expected);
        }
    }
}
