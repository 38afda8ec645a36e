//! Edits of a form that was sent after its session had ended. The sign-in form carries them, and
//! after the sign-in the browser can send them again.

use crate::limits;

use super::form::Form;
use crate::admin::console::web::address;

/// A form that was not processed.
#[derive(Clone)]
pub(crate) struct KeptForm {
    /// Address that the form was sent to.
    pub(crate) action: String,
    /// Its fields, without the form token.
    pub(crate) fields: Vec<(String, String)>,
}

impl KeptForm {
    /// Name of the field of the sign-in form with the action.
    const ACTION: &'static str = "kept_action";
    /// Name of the field of the sign-in form with the encoded fields.
    const FIELDS: &'static str = "kept_fields";

    /// A form that was sent to `action`; `None` if it has nothing to keep, is too large, or has a
    /// private key, which no page shows.
    pub(crate) fn sent_to(action: &str, body: &[u8]) -> Option<Self> {
        let action = address::checked(action);
        if body.len() > limits::ADMIN_KEPT_FORM || ["/", "/sign-out", "/theme"].contains(&action) {
            return None;
        }
        let mut fields: Vec<(String, String)> = form_urlencoded::parse(body).into_owned().collect();
        fields.retain(|(name, _)| name != Form::TOKEN);
        let has_key = fields.iter().any(|(name, _)| name == Form::PRIVATE_KEY);
        (!fields.is_empty() && !has_key).then(|| Self {
            action: action.to_owned(),
            fields,
        })
    }

    /// The form that a sign-in form carries.
    pub(crate) fn carried_by(sign_in: &Form) -> Option<Self> {
        Self::sent_to(
            sign_in.value(Self::ACTION),
            sign_in.value(Self::FIELDS).as_bytes(),
        )
    }

    /// Names and values of the fields of the sign-in form that carry it.
    pub(crate) fn carriers(&self) -> [(&'static str, String); 2] {
        let fields = form_urlencoded::Serializer::new(String::new())
            .extend_pairs(&self.fields)
            .finish();
        [(Self::ACTION, self.action.clone()), (Self::FIELDS, fields)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_kept_without_its_token_and_carried_by_another() {
        let body = b"form_token=x&name=a%26b+c&services=api&services=web&empty=";
        let kept = KeptForm::sent_to("/accounts/acme/agents/ag_1", body).unwrap();
        let fields = [
            ("name", "a&b c"),
            ("services", "api"),
            ("services", "web"),
            ("empty", ""),
        ];
        let expected = fields.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(kept.fields, expected);
        let sign_in = kept
            .carriers()
            .into_iter()
            .fold(Form::default(), |form, (name, value)| {
                form.with(name, value)
            });
        let again = KeptForm::carried_by(&sign_in).unwrap();
        assert_eq!((again.action, again.fields), (kept.action, kept.fields));
        let large = vec![b'a'; limits::ADMIN_KEPT_FORM + 1];
        for (action, body) in [
            ("/accounts", &b"form_token=x"[..]),
            ("/accounts", b""),
            (
                "/accounts/acme/domains/a.example/certificate",
                b"chain=x&private_key=y",
            ),
            ("/sign-out", b"a=b"),
            ("//evil.example", b"a=b"),
            ("https://evil.example", b"a=b"),
            ("/accounts", &large),
        ] {
            assert!(KeptForm::sent_to(action, body).is_none(), "{action}");
        }
        assert!(KeptForm::carried_by(&Form::default()).is_none());
    }
}
