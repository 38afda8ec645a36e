//! Addresses within the console that browsers are redirected to.

/// `address` if it is a path of the console, which no browser takes for a host; `/` otherwise.
pub(crate) fn checked(address: &str) -> &str {
    let is_path =
        address.starts_with('/') && !address.starts_with("//") && !address.starts_with("/\\");
    if is_path
        && address
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'\\')
    {
        address
    } else {
        "/"
    }
}

/// The sign-in page, which redirects to `next` afterwards. `has_ended` says that a session has
/// expired.
pub(crate) fn of_sign_in(next: &str, has_ended: bool) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if next != "/" {
        query.append_pair("next", next);
    }
    if has_ended {
        query.append_pair("ended", "yes");
    }
    match query.finish().as_str() {
        "" => "/sign-in".to_owned(),
        query => format!("/sign-in?{query}"),
    }
}

/// The page that gives the browser the session of `code` and redirects to `next`.
pub(crate) fn of_finish(code: &str, next: &str) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    format!(
        "/sign-in/finish?{}",
        query
            .append_pair("code", code)
            .append_pair("next", next)
            .finish()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_the_console_are_redirect_targets() {
        assert_eq!(checked("/requests?status=5xx"), "/requests?status=5xx");
        for other in [
            "",
            "requests",
            "//evil.example",
            "/\\evil.example",
            "https://evil.example",
            "/a\r\nb",
            "/\t/evil",
        ] {
            assert_eq!(checked(other), "/", "{other:?}");
        }
    }
}
